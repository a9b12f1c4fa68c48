"""The command `burst`: `doctor` says what is installed, changed and refused; `plan` what suits a cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from burst_plugin.cli import plan as plan_command
from burst_plugin.cli.doctor import framework_report, report
from burst_plugin.frameworks import FRAMEWORKS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the program's own. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough; and Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="burst", description="Ring attention for long sequences.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor", help="say what is installed, what is changed in frameworks, what is refused"
    )
    for name in FRAMEWORKS:
        framework = framework_report(name)
        doctor.add_argument(f"--{name}", metavar=framework.METAVAR, help=framework.HELP)
    doctor.set_defaults(run=_doctor)
    plan = commands.add_parser("plan", help="say what each schedule takes on a cluster that you describe")
    plan_command.add_arguments(plan)
    plan.set_defaults(run=_plan)
    return parser


def _plan(options: argparse.Namespace) -> int:
    try:
        for line in plan_command.lines(options):
            print(line)
    except ValueError as error:
        print(f"burst plan: {error}", file=sys.stderr)
        return 1
    return 0


def _doctor(options: argparse.Namespace) -> int:
    try:
        for line in report({name: getattr(options, name) for name in FRAMEWORKS}):
            print(line)
    except ValueError as error:
        print(f"burst doctor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
