"""The command `burst`: `doctor` says what is installed, changed and refused; `plan`, what suits a cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from burst_plugin.cli import doctor, plan

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the program's own, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = _print(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="burst", description="Ring attention for long sequences.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        ("doctor", doctor, "say what is installed, what is changed in frameworks, what is refused"),
        ("plan", plan, "say what each schedule takes on a cluster that you describe"),
    ):
        subparser = commands.add_parser(name, help=text)
        command.add_arguments(subparser)
        subparser.set_defaults(command=name, lines=command.lines)
    return parser


def _print(options: argparse.Namespace) -> int:
    """Print what a command has to say, line by line as it comes; return the exit status."""
    try:
        for line in options.lines(options):
            print(line)
    except ValueError as error:
        print(f"burst {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
