"""The command `burst`: `doctor` says what is installed, changed and refused; `plan`, what suits a cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from burst_plugin.cli import doctor, plan, plan_model

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the program's own, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(_is_for_a_model(given)).parse_args(given)
    try:
        status = _print(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _is_for_a_model(given: Sequence[str]) -> bool:
    """Return whether a plan is asked for a model, which takes other options than one for an attention layer."""
    return any(word.split("=")[0] == "--model" for word in given)


def _parser(for_a_model: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="burst", description="Ring attention for long sequences.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        ("doctor", doctor, "say what is installed, what is changed in frameworks, what is refused"),
        (
            "plan",
            plan_model if for_a_model else plan,
            "say what fits for a model (--model), or what each schedule takes on a cluster that you describe",
        ),
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
