"""The command `burst`: `check` proves and measures a cluster, `doctor` says what is installed, `plan` what suits."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from burst_plugin.cli import check, doctor
from burst_plugin.cli.plan_modes import mode_of, wrong_option

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the program's own, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parser(mode_of(given))
    wrong = wrong_option(given[1:]) if given[:1] == ["plan"] else None
    if wrong is not None:
        commands["plan"].error(wrong)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = _print(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser(plan_for: ModuleType) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and those of its commands by name."""
    parser = argparse.ArgumentParser(prog="burst", description="Ring attention for long sequences.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        ("check", check, "prove that a cluster is right, safe and fast, and find the strategy that suits it"),
        ("doctor", doctor, "say what is installed, what is changed in frameworks, what is refused"),
        (
            "plan",
            plan_for,
            "say what fits for a model (--model), or what each schedule takes on a cluster, measured (--profile) or "
            "described",
        ),
    ):
        subparser = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(command=name, lines=command.lines)
    return parser, commands.choices


def _print(options: argparse.Namespace) -> int:
    """Print what a command has to say, line by line as it comes; return the exit status."""
    try:
        return _print_all(iter(options.lines(options)))
    except ValueError as error:
        print(f"burst {options.command}: {error}", file=sys.stderr)
        return 1


def _print_all(lines: Iterator[str]) -> int:
    """Print lines; return what a generator of them returns, an exit status, or 0."""
    while True:
        try:
            print(next(lines), flush=True)
        except StopIteration as end:
            return end.value or 0


if __name__ == "__main__":
    sys.exit(main())
