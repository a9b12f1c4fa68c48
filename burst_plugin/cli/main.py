"""The command `burst`: `init` writes a first run, `check` proves a cluster, `doctor` and `plan` describe and plan."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import burst_plugin
from burst_plugin.checks import did_you_mean
from burst_plugin.cli import check, doctor, init, plan, plan_model


class _Command(NamedTuple):
    """How a command adds its options to a parser, and yields the lines of its output."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    lines: Callable[[argparse.Namespace], Iterator[str]]


_PLANS: Mapping[str, _Command] = MappingProxyType(
    {
        "burst plan --model": _Command(plan_model.add_arguments, plan_model.lines),
        "burst plan --profile": _Command(plan.add_measured_arguments, plan.measured_lines),
        "burst plan": _Command(plan.add_arguments, plan.lines),
    }
)
"""The three plans, each with options of its own: of a model, on a measured cluster, or on one that is described."""
_COMMANDS: Mapping[str, _Command] = MappingProxyType(
    {
        "check": _Command(check.add_arguments, check.lines),
        "doctor": _Command(doctor.add_arguments, doctor.lines),
        "init": _Command(init.add_arguments, init.lines),
    }
)
_LEAST_WIDTH = 60  # of lines on a terminal
_DESCRIBED = ("--nodes", "--ranks-per-node", "--heads", "--head-dim", "--dtype", "--nic", "--mesh-degree")
"""Options by which the plan is one on a described cluster, where neither a model nor a profile is given."""
_INSTEAD = {
    ("burst plan --model", "--nodes"): ": give --gpus, those of all nodes, and --gpus-per-node",
    ("burst plan --model", "--ranks-per-node"): ": give --gpus-per-node",
    ("burst plan --model", "--heads"): ": the model has its own",
    ("burst plan --model", "--head-dim"): ": the model has its own",
    ("burst plan", "--gpus"): ": name a model, or give --nodes and --ranks-per-node",
    ("burst plan", "--gpus-per-node"): ": name a model, or give --ranks-per-node",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `burst`, print its output, and return its exit status.

    arguments: the words after `burst`; None for the words that this program was started with. Exits, as argparse
    does, for options that are not valid.
    """
    words = _with_model_option(list(sys.argv[1:] if arguments is None else arguments))
    parser, commands = _parser(_PLANS[_plan_title(words)])
    wrong = _wrong_plan_option(words[1:]) if words[:1] == ["plan"] else None
    if wrong is not None:
        commands["plan"].error(wrong)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        command = commands[options.command]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(command, unknown[0])}")
    try:
        status = _print(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python's own last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser(plan_command: _Command) -> tuple[argparse.ArgumentParser, Mapping[str, Any]]:
    """Return the parser, and the parsers of its commands by name."""
    parser = argparse.ArgumentParser(prog="burst", description="Ring attention for long sequences.")
    versions = f"burst_plugin {burst_plugin.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        (
            "check",
            _COMMANDS["check"],
            "prove that a cluster is right, safe and fast, and find the strategy that suits it",
        ),
        ("doctor", _COMMANDS["doctor"], "say what is installed, what is changed in frameworks, what is refused"),
        ("init", _COMMANDS["init"], "write a small training run to begin with"),
        (
            "plan",
            plan_command,
            "say how to train a model on long sequences, and what that takes; or what each schedule takes on a "
            "cluster, measured (--profile) or described",
        ),
    ):
        subparser = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(command=name, lines=command.lines)
    return parser, commands.choices


def _with_model_option(words: list[str]) -> list[str]:
    """Return the words of a command line with `--model` before a model that comes first: `burst plan NAME ...`."""
    if words[:1] == ["plan"] and len(words) > 1 and not words[1].startswith("-"):
        return ["plan", "--model", *words[1:]]
    return words


def _plan_title(words: Sequence[str]) -> str:
    """Return the title of the plan that the words ask for; by default the plan of a model."""
    names = set(_option_names(words))
    if "--model" in names:
        return "burst plan --model"
    if "--profile" in names:
        return "burst plan --profile"
    return "burst plan" if names.intersection(_DESCRIBED) else "burst plan --model"


def _wrong_plan_option(words: Sequence[str]) -> str | None:
    """Return a message on an option that the requested plan does not have, or a model that it lacks; else None."""
    title, names = _plan_title(words), list(_option_names(words))
    valid = {name: _options(command) for name, command in _PLANS.items()}
    for option in names:
        if option in valid[title]:
            continue
        others = [f"`{name}`" for name, options in valid.items() if option in options]
        if others:
            instead = _INSTEAD.get((title, option), "")
            return f"{option} is an option of {' and '.join(others)}, not of `{title}`{instead}"
        nearest = did_you_mean(option, sorted(set().union(*valid.values())), 0.7)
        return f"{option} is not an option{nearest}; see `{title} ... --help`"
    if title == "burst plan --model" and not {"--model", "--help"}.intersection(names) and "-h" not in words:
        return "name a model, such as llama3_8b, or a config.json: burst plan MODEL --seq 1m"
    return None


def _meant(parser: argparse.ArgumentParser, word: str) -> str:
    """Return a guess at the option behind a word that a command does not know; empty if none is likely."""
    valid = [option for action in parser._actions for option in action.option_strings]
    return did_you_mean(word.split("=")[0], valid, 0.7)


def _option_names(words: Sequence[str]) -> Iterator[str]:
    """Yield the long options among the words of a command line, without their values."""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            yield word.split("=")[0]


def _options(command: _Command) -> set[str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def _wrapped(text: str) -> str:
    """Return a text whose lines fit the terminal, if it goes to one; programs that read it get whole lines."""
    if not sys.stdout.isatty():
        return text
    width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        filled = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, replace_whitespace=False
        )
        lines += [line] if len(line) <= width else filled
    return "\n".join(lines)


def _print(options: argparse.Namespace) -> int:
    """Print the output of a command, line by line as it comes; return the exit status.

    The status is the return value of the generator of lines, or 0.
    """
    lines = iter(options.lines(options))
    try:
        while True:
            print(_wrapped(next(lines)), flush=True)
    except StopIteration as end:
        return end.value or 0
    except ValueError as error:
        print(f"burst {options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
