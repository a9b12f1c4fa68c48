"""The profile of a cluster: read back as written, refused with what differs, and taken by Strategy and planner."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from burst_plugin import Strategy, Topology
from burst_plugin.cli import main
from burst_plugin.compute.shapes import Shapes
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.megatron.flags import arguments
from burst_plugin.planning.cluster import Links
from burst_plugin.planning.measured import measured_links, measured_work_seconds
from burst_plugin.planning.price import work_seconds
from burst_plugin.profiling.cluster_profile import (
    VERSION,
    ClusterProfile,
    KernelRate,
    LinkRate,
    Model,
    device_name,
)

PROFILE = ClusterProfile(
    nodes=2,
    ranks_per_node=4,
    device=device_name(),
    backend="gloo",
    intra=LinkRate(400e9, 1e-5),
    inter=LinkRate(2e9, 2e-5),
    nic="rank",
    kernel="torch_cpu",
    dtype="bfloat16",
    rates=(KernelRate(1024, 200e12, 100e12), KernelRate(4096, 400e12, 300e12)),
    model=Model(32, 8, 128, 65536, "causal"),
    strategy={"schedule": "two_level_ring", "parts": [4, 2], "backward": "kv", "ranks_per_node": 4},
    why="because",
    runner_up="none",
)

MEGATRON = {"num_attention_heads": 16, "group_query_attention": True, "num_query_groups": 4, "kv_channels": 64}
MEGATRON |= {"tensor_model_parallel_size": 2, "seq_length": 32768}


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert ClusterProfile.read(path) == PROFILE
    assert ClusterProfile.read(str(path)) == PROFILE
    assert ClusterProfile.read(json.loads(path.read_text())) == PROFILE
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]
    one_node = replace(PROFILE, nodes=1, inter=None)
    assert ClusterProfile.read(one_node.as_dict()) == one_node


def test_a_strategy_comes_from_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    found = Strategy.from_profile(path)
    assert found == Strategy.from_profile(PROFILE.as_dict(), topology=Topology(2, 4))
    assert (found.measured, found.model, found.given) == (PROFILE, PROFILE.model, ())
    sizes = {"q_heads": 64, "kv_heads": 4, "seq": 1 << 20}
    asked = Strategy.from_profile(path, model=sizes, backward="q", forward="auto", check="always")
    assert asked.model == Model(64, 4, 128, 1 << 20, "causal"), "what is left out is the profile's"
    assert asked.given == ("backward", "check"), "auto is not set"
    assert (asked.backward, asked.check) == ("q", "always")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"heads": 3}, r"give sizes by name: q_heads, kv_heads, head_dim, seq, mask"),
        ({"seq": 0}, "use whole numbers, 1 or more"),
        ({"seq": "long"}, "use whole numbers, 1 or more"),
        ({"kv_heads": 5}, r"kv_heads that divides q_heads \(it is 32/5\)"),
        ({"mask": "sparse"}, "a mask of causal, full"),
        ("llama", "model='llama' is not valid"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Strategy.from_profile(PROFILE.as_dict(), model=sizes)


def _with(path: str, value: Any) -> dict[str, Any]:
    """The profile with another value at a path such as "rates.0.rows"; without the entry if it is `...`."""
    whole = json.loads(json.dumps(PROFILE.as_dict()))
    *outer, last = (int(each) if each.isdigit() else each for each in path.split("."))
    entry: Any = whole
    for each in outer:
        entry = entry[each]
    entry[last] = value
    if value is ...:
        del entry[last]
    return copy.deepcopy(whole)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 0, f"has version 0, and this burst_plugin reads version {VERSION}; run burst check again"),
        ("version", ..., "has version None, and this"),
        ("format", "json", "is not one that burst check wrote"),
        ("device", "an abacus", "it was measured on an abacus, and this is"),
        ("nodes", 0, "is damaged: nodes is 0, expected a whole number, 1 or more"),
        ("nodes", ..., "is damaged: nodes is None"),
        ("nodes", True, "is damaged: nodes is True"),
        ("links", {}, "is damaged: links is such an entry, expected no such entry"),
        ("inter", None, "is damaged: inter is None, expected an object"),
        ("inter.bytes_per_s", -1.0, "is damaged: inter.bytes_per_s is -1.0, expected a positive number"),
        ("inter.bytes_per_s", float("nan"), "is damaged: inter.bytes_per_s is nan"),
        ("nodes", 1, "is damaged: inter is "),
        ("nic", "both", "is damaged: nic is 'both', expected one of rank, node"),
        ("rates", [], "is damaged: rates is [], expected a list of rates by tile size"),
        ("rates.1.rows", 1024, "is damaged: rates is tiles in another order"),
        ("rates.0.forward_flops_per_s", "fast", "is damaged: rates[0].forward_flops_per_s is 'fast'"),
        ("model.mask", "sparse", "is damaged: model.mask is 'sparse', expected one of causal, full"),
        ("strategy", [1], "is damaged: strategy is [1], expected an object"),
        ("strategy.schedule", "square", "is damaged: strategy: schedule='square' is not valid; use one of:"),
        ("strategy.speed", 3, "is damaged: strategy: there is no option speed; the options are: layout"),
        ("dtype", "int8", "is damaged: dtype is 'int8'"),
    ],
)
def test_other_profiles_are_refused_with_what_differs(path: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"^the profile") as refused:
        Strategy.from_profile(_with(path, value))
    assert said in str(refused.value)


def test_the_profile_of_a_cluster_of_other_sizes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"measured on 2x4 \(nodes x ranks per node\), and this is 4x4 .*; run burst"
    ):
        Strategy.from_profile(PROFILE.as_dict(), topology=Topology(4, 4))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(
        ValueError, match=r"cannot be read \(No such file or directory\); run burst check to make one"
    ):
        Strategy.from_profile(path)
    PROFILE.save(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match="is damaged: it is not JSON"):
        Strategy.from_profile(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is damaged: it is not JSON"):
        Strategy.from_profile(path)
    with pytest.raises(ValueError, match=r"profile=3 is not valid; give the path of a burst-profile\.json"):
        Strategy.from_profile(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no option sped;"):
        Strategy.from_profile(PROFILE.as_dict(), sped=1)


def test_the_planner_takes_measured_rates() -> None:
    assert measured_links(PROFILE) == Links(400e9, 2e9, "rank", 1e-5, 2e-5)
    assert measured_links(replace(PROFILE, nodes=1, inter=None)).inter_bytes_per_s == 400e9
    shared = replace(PROFILE, nic="node")
    assert [measured_links(shared, Topology(8, n)).inter_bytes_per_s for n in (1, 2, 4)] == [0.5e9, 1e9, 2e9]
    for ring in (Topology(1, 8), Topology(2, 5)):
        with pytest.raises(ValueError, match=f"measured on 2x4 .*, and this is {ring.nodes}x{ring.ranks_per_node}"):
            measured_links(PROFILE, ring)
    with pytest.raises(ValueError, match="run burst check again"):
        measured_links(replace(PROFILE, nodes=1, inter=None), Topology(2, 4))
    shapes = Shapes(1, 4096, 4096, 32, 8, 128, 128, torch.bfloat16)
    forward_s, backward_s = measured_work_seconds(PROFILE, shapes, True)
    assert forward_s == pytest.approx(work_seconds(shapes, 400e12, True)[0])
    assert backward_s == pytest.approx(work_seconds(shapes, 300e12, True)[1])
    for rows, rate in ((64, 200e12), (1024, 200e12), (2048, 300e12), (1 << 20, 400e12)):
        some = shapes._replace(q_len=rows, kv_len=rows)
        assert measured_work_seconds(PROFILE, some, False)[0] == pytest.approx(work_seconds(some, rate, False)[0])


def test_plan_prices_with_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert main(["plan", "--profile", str(path)]) == 0
    measured = capsys.readouterr().out
    assert "2x4 (nodes x ranks per node), 8192 tokens per rank, 32/8 heads of 128, bfloat16, causal" in measured
    assert "400/300 TFLOP/s forward/backward, 400 GB/s inside nodes, 2 GB/s between nodes, a NIC per rank" in measured
    intra, inter = LinkRate(400e9, 1e-15), LinkRate(2e9, 1e-15)
    same = replace(PROFILE, rates=(KernelRate(1, 400e12, 400e12),), intra=intra, inter=inter)
    same.save(path)
    assert main(["plan", "--profile", str(path), "--heads", "32/8"]) == 0
    of_profile = capsys.readouterr().out.splitlines()[2:]
    words = "--nodes 2 --ranks-per-node 4 --seq 65536 --heads 32/8 --tflops 400 --intra-gb-s 400 --inter-gb-s 2"
    assert main(["plan", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == of_profile, "the same rates give the same plans"
    assert main(["plan", "--profile", str(path), "--nodes", "4"]) == 0
    assert "4x4 (nodes x ranks per node), 4096 tokens per rank" in capsys.readouterr().out


def test_a_profile_may_have_the_rates_of_nodes_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan goes by `rates` and `inter`, which are those of the slowest."""
    path = tmp_path / "profile.json"
    node_rates, rank_rates = (8e9, 2e9, 8.1e9), (400e12, 410e12, 390e12, 400e12, 400e12, 200e12)
    without = replace(PROFILE, nodes=3, ranks_per_node=2)
    unlike = replace(without, node_rates=node_rates, rank_rates=rank_rates)
    shown = []
    for profile in (unlike, without):
        profile.save(path)
        assert ClusterProfile.read(path) == profile
        assert main(["plan", "--profile", str(path)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    for name, values in (("node_rates", [1.0, 2.0]), ("rank_rates", "fast"), ("node_rates", [1.0, 0, 1.0])):
        with pytest.raises(ValueError, match=f"is damaged: {name}"):
            ClusterProfile.read({**unlike.as_dict(), name: values})


def test_plan_refuses_what_a_profile_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    replace(PROFILE, nodes=1, inter=None).save(path)
    for words, said in (
        (["--nodes", "2"], "is of one node, without links to others; run burst check on two nodes or more"),
        (["--seq", "3"], "--seq 3 is fewer tokens than the 4 ranks"),
    ):
        assert main(["plan", "--profile", str(path), *words]) == 1
        assert said in capsys.readouterr().err


def test_frameworks_take_a_profile_with_options_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    block = Block.of({BLOCK: {"profile": str(path), "seq_length": 4096, "backward": "q"}})
    assert block is not None
    assert block.strategy == Strategy.from_profile(path, model={"seq": 4096}, backward="q")
    with pytest.raises(ValueError, match="seq_length=4096 has no effect without a profile"):
        Block.of({BLOCK: {"seq_length": 4096}})
    with pytest.raises(ValueError, match=r'^"burst_attention": the profile .* cannot be read'):
        Block.of({BLOCK: {"profile": str(tmp_path / "none")}})
    parser = arguments.add_arguments(argparse.ArgumentParser())
    words = ["--burst-profile", str(path), "--burst-backward", "q"]
    monkeypatch.setattr(arguments, "parsed_arguments", lambda: parser.parse_args(words))
    assert arguments.parsed_strategy() == Strategy.from_profile(path, backward="q")
    args = parser.parse_args(words)
    vars(args).update(MEGATRON)
    monkeypatch.setattr(arguments, "parsed_arguments", lambda: args)
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "seq": 32768}
    assert arguments.parsed_strategy() == Strategy.from_profile(path, model=sizes, backward="q")
    vars(args).update(multi_latent_attention=True, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    sizes |= {"kv_heads": 8, "head_dim": 160}
    assert arguments.parsed_strategy() == Strategy.from_profile(path, model=sizes, backward="q")
    monkeypatch.setattr(arguments, "parsed_arguments", lambda: parser.parse_args([]))
    assert arguments.parsed_strategy() == Strategy()
