"""Options of `Strategy` as flags, keys and the page about them, from its fields alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from burst_plugin import Strategy
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.frameworks import options
from burst_plugin.megatron.flags.arguments import add_arguments, written
from tools import tables

OTHER_VALUES: dict[str, Any] = {  # other than the default; numbers and switches have them by type
    "bool": True,
    "int": 2,
    "float": 2.5,
    "float | str": 0.5,
    "int | str": 2,
    "int | tuple[int, int]": (1, 2),
}


@pytest.mark.parametrize("option", fields(Strategy), ids=lambda option: option.name)
def test_every_option_is_a_key_and_says_what_it_is(option: Any) -> None:
    assert option.metadata["help"][0].islower() or option.metadata["help"][0] == "`"
    value = other_value(option)
    block = Block.of({BLOCK: {option.name: value}})
    assert block is not None
    assert getattr(block.strategy, option.name) == value


def other_value(option: Any) -> Any:
    choices = [choice for choice in option.metadata["choices"] if choice != option.default]
    return choices[0] if choices else OTHER_VALUES[option.type]


@pytest.mark.parametrize("option", fields(Strategy), ids=lambda option: option.name)
def test_every_option_can_be_a_flag(option: Any) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--it", **options.flag_keywords(option))
    assert "](" not in parser.format_help(), "links are left out"
    default = parser.parse_args([]).it
    assert default == ([option.default] if isinstance(default, list) else option.default)
    value = other_value(option)
    numbers = value if isinstance(value, tuple) else (value,)
    parsed = parser.parse_args(["--it", *(() if value is True else map(str, numbers))]).it
    assert parsed == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(("name", "instead"), [("ulysses_degree", ", node or all"), ("ranks_per_node", " or auto")])
def test_a_word_that_is_no_value_is_told_which_are(
    name: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--it", **options.flag_keywords(Strategy.__dataclass_fields__[name]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--it", "nodes"])
    assert re.search(
        f"argument --it: 'nodes' is not valid; use a number.*{instead}$", capsys.readouterr().err.strip()
    )


def test_megatrons_flags_are_all_options_but_those_that_say_what_takes_their_place() -> None:
    given = vars(add_arguments(argparse.ArgumentParser()).parse_args([]))
    for option in fields(Strategy):
        assert (f"--burst-{option.name.replace('_', '-')}" in written(option.name)) == (
            f"burst_{option.name}" in given
        )
    assert len(given) == len(fields(Strategy)) - 4 + len(["burst_preset", "burst_profile"])


def test_an_option_that_is_added_is_in_the_table() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Strategy):
        wait: bool = field(default=False, metadata={"help": "whether to wait, 5 % [longer](there.md)", "choices": ()})

    assert options.flag_keywords(fields(More)[-1])["help"] == "whether to wait, 5 %% longer"
    assert tables.options(More).endswith(
        "\n| `wait` | `--burst-wait` | `false` | whether to wait, 5 % [longer](there.md) |"
    )
