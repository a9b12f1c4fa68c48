"""The block "burst_attention": what it takes, and what it says about the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from burst_plugin import Strategy
from burst_plugin.deepspeed.config import BLOCK, Block, conflicts, near_misses, warn_of_near_misses

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
        ({"backward": "k"}, "backward='k' is not valid; use one of: "),
        ({"ranks_per_node": 0}, "ranks_per_node=0 is not valid"),
        ("yes", "got 'yes', expected a block such as {\"enabled\": true}"),
        (True, "got True, expected a block"),
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
        (4, 8, [2], "context_parallel_size=4 contradicts [2] asked for by an mpu or by sp_size"),
    ],
)
def test_sizes_that_do_not_fit(asked: int | str, world: int, others: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Block(True, asked, Strategy()).size(world, others)


@pytest.mark.parametrize(
    "name", ["burst_atention", "burst-attention", "BurstAttention", "burst_attn", "burstattention"]
)
def test_a_near_miss_of_the_blocks_name_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=f'has "{name}", but no "burst_attention"'):
        warn_of_near_misses({name: EVERY_KEY, "zero_optimization": {}})


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
