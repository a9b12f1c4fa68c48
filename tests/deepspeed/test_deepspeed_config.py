"""The block "burst_attention": what it takes, and what it says about the rest."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from burst_plugin import Strategy
from burst_plugin.cli import main
from burst_plugin.deepspeed.config import (
    BLOCK,
    REFUSED,
    Block,
    RepeatedKeyError,
    conflicts,
    loads,
    near_misses,
    warn_of_near_misses,
)

EVERY_KEY = {
    "enabled": True,
    "context_parallel_size": 8,
    "ranks_per_node": "auto",
    "layout": "zigzag",
    "schedule": "auto",
    "backward": "auto",
    "kernel": "auto",
}


def test_the_block_of_the_readme() -> None:
    block = Block.of({BLOCK: EVERY_KEY})
    assert block == Block(True, 8, Strategy())
    assert Block.of({BLOCK: {**EVERY_KEY, "layout": "striped"}}) == Block(True, 8, Strategy(layout="striped"))
    assert Block.of({"zero_optimization": {}}) is None
    assert Block.of({BLOCK: {"enabled": False}}) == Block(False, "auto", Strategy())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"enabeld": True}, 'unknown key "enabeld" (did you mean "enabled"?); valid keys: enabled, context_parallel'),
        ({"context_parallel": 4}, 'did you mean "context_parallel_size"'),
        ({"context-parallel-size": 4}, 'did you mean "context_parallel_size"'),
        ({"rank_per_node": 4, "layuot": "zigzag"}, '"rank_per_node" (did you mean "ranks_per_node"?), "layuot" (did'),
        ({"zzz": 4}, 'unknown key "zzz"; valid keys'),
        ({"enabled": "true"}, "enabled='true' is not valid; use true or false"),
        ({"context_parallel_size": 0}, 'context_parallel_size=0 is not valid; use a positive number or "auto"'),
        ({"context_parallel_size": True}, "context_parallel_size=True is not valid"),
        (
            {"layout": "zig"},
            "\"burst_attention\": layout='zig' is not valid; use one of: zigzag, striped, contiguous",
        ),
        ({"schedule": "ring"}, "schedule='ring' is not valid; use one of: "),
        ({"offload": "true"}, "\"burst_attention\": offload='true' is not valid; use true or false"),
        ({"late_after": "60"}, "late_after='60' is not valid; use a positive number of seconds, such as 60"),
        ({"backward": "k"}, "backward='k' is not valid; use one of: "),
        ({"ranks_per_node": 0}, "ranks_per_node=0 is not valid"),
        ("yes", "got 'yes', expected a block such as {\"enabled\": true}"),
        (True, "got True, expected a block"),
        (None, "got None, expected a block"),
    ],
    ids=str,
)
def test_what_is_not_valid_is_named_with_what_is(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Block.of({BLOCK: block})


@pytest.mark.parametrize(
    ("asked", "world", "others", "size"), [(4, 8, [], 4), ("auto", 8, [], 8), ("auto", 8, [2], 2), (2, 8, [2], 2)]
)
def test_context_parallel_size(asked: int | str, world: int, others: list[int], size: int) -> None:
    assert Block(True, asked, Strategy()).size(world, others) == size


@pytest.mark.parametrize(
    ("asked", "world", "others", "message"),
    [
        (3, 8, [], "context_parallel_size=3 does not divide the 8 ranks"),
        ("auto", 8, [3], "context_parallel_size=3 does not divide the 8 ranks"),
        (4, 8, [2], "context_parallel_size=4 contradicts [2], which an mpu or sp_size"),
    ],
)
def test_sizes_that_do_not_fit(asked: int | str, world: int, others: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Block(True, asked, Strategy()).size(world, others)


@pytest.mark.parametrize(
    "name", ["burst_atention", "burst-attention", "BurstAttention", "burst_attn", "burstattention", "burst", "Burst"]
)
def test_a_near_miss_of_the_blocks_name_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=f'has "{name}", but no "burst_attention"'):
        warn_of_near_misses({name: EVERY_KEY, "zero_optimization": {}})


@pytest.mark.parametrize("outer", ["zero_optimization", "activation_checkpointing", "optimizer.params"])
@pytest.mark.parametrize("name", [BLOCK, "burst"])
def test_a_block_inside_another_one_warns(outer: str, name: str) -> None:
    config: dict[str, Any] = {name: EVERY_KEY}
    for key in reversed(outer.split(".")):
        config = {key: {"stage": 1, **config}}
    with pytest.warns(UserWarning, match=f'has "{outer}.{name}", but no "burst_attention" at its top level'):
        warn_of_near_misses(config)


def test_what_is_said_twice_in_one_block_is_an_error() -> None:
    for text in (
        f'{{"{BLOCK}": {{"layout": "zigzag", "layout": "striped"}}}}',
        f'{{"{BLOCK}": {{}}, "{BLOCK}": {{}}}}',
    ):
        with pytest.raises(RepeatedKeyError, match=r'has "(layout|burst_attention)" more than once in one block'):
            loads(text)
    assert loads('{"a": {"stage": 1}, "b": {"stage": 2}}') == {"a": {"stage": 1}, "b": {"stage": 2}}


STRANGE: list[Any] = [5, -1, 2.5, True, "2", "x", [], [1], ["autosp"], {}, {"a": 1}]


@pytest.mark.parametrize("path", [*REFUSED, "sequence_parallel_size"])
def test_values_of_any_type_are_looked_at_without_a_fault(path: str) -> None:
    """Those that DeepSpeed refuses itself included; and blocks that are none."""
    keys = path.split(".")
    for depth in range(1, len(keys) + 1):
        for value in STRANGE:
            config = value
            for key in reversed(keys[:depth]):
                config = {key: config}
            for reason in conflicts(config, 2):
                assert ": " in reason or "; expected a block" in reason


@pytest.mark.parametrize(
    "key", ["enabled", "context_parallel_size", "loss", *(each.name for each in fields(Strategy))]
)
def test_keys_of_any_type_are_errors_of_one_kind(key: str) -> None:
    for value in STRANGE:
        said = _said(lambda value=value: Block.of({BLOCK: {key: value}}))
        assert not said or f'"{BLOCK}": {key}={value!r} is not valid' in said


def _said(fn: Callable[[], Any]) -> str:
    """The text of a ValueError; empty if there is none."""
    try:
        fn()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"compile": {"passes": 5}, %s}', "compile.passes=5 does not go together with burst_attention: give a list"),
        ('{"compile": 5, %s}', "compile=5 is not valid; expected a block, {...}"),
        ('{"tensor_parallel": {"autotp_size": "2"}, %s}', "tensor_parallel.autotp_size='2' does not go together"),
        ('{"sequence_parallel_size": [2], %s}', "sequence_parallel_size=[2] (Ulysses) contradicts"),
        ('{"burst_attention": null}', "got None, expected a block"),
        ('{"burst_attention": {"layout": "zigzag", "layout": "striped"}}', 'has "layout" more than once'),
        ("5", "got int, expected a DeepSpeed configuration"),
        ("[" * 100_000, "give a file with a DeepSpeed configuration in JSON"),
    ],
    ids=lambda text: text[:40],
)
def test_burst_doctor_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text.replace("%s", f'"{BLOCK}": {{"context_parallel_size": 4}}'))
    assert main(["doctor", "--deepspeed", str(path)]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_burst_doctor_says_which_mean_is_asked_for_and_what_may_be_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({BLOCK: {"context_parallel_size": 4, "loss": "mean_of_ranks"}}))
    assert main(["doctor", "--deepspeed", str(path)]) == 0
    assert "burst attention is on, context_parallel_size=4, loss='mean_of_ranks'" in capsys.readouterr().out
    path.write_text(json.dumps({"zero_optimization": {BLOCK: {"context_parallel_size": 4}}}))
    assert main(["doctor", "--deepspeed", str(path)]) == 0
    assert 'it has "zero_optimization.burst_attention": write "burst_attention" at the top' in capsys.readouterr().out


def test_json_without_hjson_is_read_as_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loads('{"a": 1}') == {"a": 1}
    with pytest.raises(RepeatedKeyError, match='has "a" more than once'):
        loads('{"a": 1, "a": 2}')


def test_other_names_do_not_warn() -> None:
    assert not near_misses(
        {"zero_optimization": {}, "activation_checkpointing": {}, "sparse_attention": {}, "bf16": {}}
    )
    assert not near_misses({BLOCK: {}, "burst_attn": {}}), "the block is there"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_allreduce_op": "sum"},
            "gradient_allreduce_op='sum' does not go together with burst_attention: use",
        ),
        ({"gradient_allreduce_op": "SUM"}, "gradient_allreduce_op='SUM'"),
        ({"data_parallel_size": 2, "sequence_parallel_size": 2}, "data_parallel_size=2"),
        ({"data_parallel_size": 1, "sequence_parallel_size": 4}, "data_parallel_size=1 beside"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2 (Ulysses) contradicts context_parallel_size=4"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size=2"),
        ({"compile": {"deepcompile": True, "passes": ["autosp"]}}, "compile.passes=['autosp']"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile=True"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled=True"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients=True"),
        ({"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}, "curriculum_learning"),
        ({"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}}, "dynamic_batching"),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer="),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "zero_optimization.mics_shard_size=2"),
        ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, "random_ltd.enabled=True"),
    ],
    ids=str,
)
def test_what_does_not_go_together(config: dict[str, Any], message: str) -> None:
    (found,) = conflicts(config, 4)[:1]
    assert message in found
    assert ": " in found


def test_what_goes_together() -> None:
    assert not conflicts(
        {
            "gradient_allreduce_op": "average",
            "sequence_parallel_size": 4,
            "tensor_parallel": {"autotp_size": 1},
            "expert_parallel": None,
            "compile": {"deepcompile": False},
            "hybrid_engine": {"enabled": False},
            "zero_optimization": {
                "stage": 3,
                "mics_shard_size": -1,
                "zero_hpz_partition_size": 4,
                "zero_quantized_weights": True,
            },
            "checkpoint": {"tag_validation": "Warn"},
            "data_efficiency": {"data_routing": {"random_ltd": {"enabled": False}}},
        },
        4,
    )


def test_importing_the_adapters_imports_no_framework() -> None:
    code = (
        "import sys, burst_plugin.deepspeed, burst_plugin.huggingface, burst_plugin.deepspeed.config; "
        "print([name for name in ('deepspeed', 'transformers', 'accelerate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
