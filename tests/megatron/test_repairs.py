"""Each repair against the fault that it is for: seen in the version at hand, or in a stand-in for another one."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from megatron.core import __version__, parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_layer import TransformerLayer

from burst_plugin.megatron import cpu, packed_indices
from burst_plugin.megatron.cpu.repairs import CPU_REPAIRS
from burst_plugin.megatron.layers.core_attention import BurstCoreAttention
from burst_plugin.megatron.releases import RELEASES, about, parse_version
from burst_plugin.megatron.repairs import batches
from burst_plugin.megatron.repairs.faults import REPAIRS, apply_repairs
from tests.megatron.test_adapter import CP4
from tests.megatron.test_interplay import EXPERTS
from tests.megatron.test_parity import _step
from tests.support.megatron_gpt import (
    GptRun,
    build,
    check_close,
    cut_batch,
    join,
    leave,
    loss_of,
    one_step,
    random_tokens,
    transformer_config,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

VERSION = parse_version(__version__)
EVERY = (*REPAIRS, *CPU_REPAIRS)
NAMES = [repair.name for repair in EVERY]
FILLS_UP = "_prepare_mla_core_attention_value"  # of Megatron, since 0.18


def status(name: str, version: tuple[int, int, int]) -> str:
    (repair,) = [repair for repair in EVERY if repair.name == name]
    return repair.status(version)


def apply_one(name: str) -> None:
    """Apply a repair, whatever the release."""
    (chosen,) = [each for each in EVERY if each.name == name]
    chosen.apply()


def test_repairs_have_names_and_are_guarded_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert status("layer_cp_comm_type", (0, 16, 1)) == "applied"
    assert status("layer_cp_comm_type", (0, 17, 0)) == "not needed since 0.17.0"
    assert status("token_prediction_without_labels", (0, 16, 1)) == "applied"
    assert status("packed_batch", (0, 17, 1)) == "applied"
    assert status("packed_batch", (0, 18, 2)) == "not needed since 0.18.0"
    assert status("router_losses_per_token", (0, 18, 2)) == "applied"
    assert status("router_losses_per_token", (0, 19, 0)) == "not needed since 0.19.0"
    for release in RELEASES:
        assert status("hierarchical_groups", release.versions[0]) == "applied"
        assert "not tested" not in about(release.versions[0])
    assert about((0, 99, 0)).startswith("Megatron 0.99.0: not tested; tested are core_v0.16.1")
    done: list[str] = []
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    monkeypatch.setattr(utils, "tex", object())
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    for name in batches.CUT_BATCH:
        monkeypatch.delattr(utils, name, raising=False)
    monkeypatch.delattr(multi_latent_attention, FILLS_UP, raising=False)
    fakes = tuple(replace(repair, apply=lambda name=repair.name: done.append(name)) for repair in EVERY)
    lines = apply_repairs(fakes, (0, 17, 1))
    assert done == [
        "hierarchical_groups",
        "packed_batch",
        "packed_token_prediction",
        "yarn_tables",
        "two_interleaved_stages",
        "delta_net_config",
        "router_losses_per_token",
        "resume_without_te",
        "resume_in_float32",
        "indexer_in_float32",
        "hybrid_models_without_te",
    ]
    assert [line.split(":")[0] for line in lines] == [f"repaired {name}" for name in done]


# ------------------------------------------------------------------------------------------------ layer_cp_comm_type

LISTED = GptRun(layers=2, cp=2, cp_comm_type="burst", config={"cp_comm_type": ["burst", "burst"]})


def _unrepaired(rank: int) -> str:
    """How the fault shows: build a layer of the unchanged class, as `TransformerBlock` does."""
    from burst_plugin.megatron import adapter

    adapter.apply_repairs = lambda repairs, version: []  # type: ignore[assignment]
    try:
        build(LISTED)
    except IndexError as error:
        return str(error)
    return "no fault"


def test_a_list_of_cp_comm_types_works() -> None:
    if VERSION < (0, 17, 0):
        assert all(fault.startswith("list index out of range") for fault in run_ranks(_unrepaired, 2))
    (one,) = run_ranks(_step, 1, GptRun(layers=2))
    for result in run_ranks(_step, 2, LISTED):
        check_close(result, one)


def test_each_layer_reads_its_own_item(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def init(layer: Any, config: Any, submodules: Any, layer_number: int) -> None:  # as 0.16.1 reads it
        seen.append(config.cp_comm_type[layer_number])
        if layer_number == 3:
            raise RuntimeError

    monkeypatch.setattr(TransformerLayer, "__init__", init)
    apply_one("layer_cp_comm_type")
    listed = ["p2p", "burst", "a2a"]
    config = types.SimpleNamespace(cp_comm_type=listed)
    for number in (1, 2):
        TransformerLayer(config, None, layer_number=number)
    with pytest.raises(RuntimeError):
        TransformerLayer(config, None, layer_number=3)
    assert seen == listed
    assert config.cp_comm_type is listed, "the configuration is left as it was, after an error too"
    config.cp_comm_type = "burst"
    with pytest.raises(IndexError):  # a string is handed on as it is: "burst"[9]
        TransformerLayer(config, None, layer_number=9)


# ----------------------------------------------------------------------------------------------- hierarchical_groups


def _rebuilt(rank: int) -> list[bool]:
    made = []
    for _ in range(2):
        build(CP4)
        made.append(parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is not None)
        leave()
        made.append(parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is not None)
    return made


def test_hierarchical_groups_go_with_the_others() -> None:
    assert run_ranks(_rebuilt, 4) == [[True, False, True, False]] * 4


# ----------------------------------------------------------------------------------------------------- packed batches

OFFSETS = [0, 8, 24, 24, 40]  # three documents; a fourth is empty, as 0.19 pads offsets
ROWS = [
    [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 36, 37, 38, 39],
    [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29, 30, 31, 32, 33, 34, 35],
]


def packed_batch() -> dict[str, Any]:
    whole = torch.arange(40).view(1, -1)
    return {
        "tokens": whole,
        "labels": whole + 1,
        "loss_mask": whole * 0.5,
        "position_ids": whole,
        "attention_mask": None,
    }


@pytest.mark.parametrize("padded", [None, torch.tensor([OFFSETS], dtype=torch.int32)], ids=["plain", "padded"])
def test_packed_batches_are_cut_until_0_17(monkeypatch: pytest.MonkeyPatch, padded: Any) -> None:
    monkeypatch.setattr(utils, "get_thd_batch_on_this_cp_rank", None, raising=False)
    batches.cut_packed_batches()
    lengths = torch.tensor([OFFSETS if padded is None else [0, 7, 20, 20, 36]], dtype=torch.int32)
    for rank in (0, 1):
        batch, params = utils.get_thd_batch_on_this_cp_rank(
            {**packed_batch(), "own": torch.arange(40).view(1, -1), "max_seqlen": torch.tensor([16])},
            *(lengths, padded, torch.tensor([16])),
            cp_size=2,
            cp_rank=rank,
        )
        assert batch["tokens"].tolist() == [ROWS[rank]]
        assert batch["labels"].tolist() == [[row + 1 for row in ROWS[rank]]]
        assert batch["loss_mask"].tolist() == [[row * 0.5 for row in ROWS[rank]]]
        assert batch["own"].tolist() == [ROWS[rank]], "as Megatron does: all but what it names"
        assert batch["max_seqlen"].tolist() == [16]
        assert batch["attention_mask"] is None
        assert params.qkv_format == "thd"
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == lengths[0].tolist()
        assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == OFFSETS
        assert params.max_seqlen_q == params.max_seqlen_kv == 16
    whole, _ = utils.get_thd_batch_on_this_cp_rank(packed_batch(), lengths, padded, torch.tensor([16]), 1, 0)
    assert whole["tokens"].tolist() == [list(range(40))]


@pytest.mark.parametrize("name", batches.WANT_TE)
def test_packed_batches_are_cut_without_transformer_engine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(utils, "tex", None, raising=False)
    for each in batches.WANT_TE:
        monkeypatch.delattr(utils, each, raising=False)
    assert status("packed_batch_without_te", VERSION) == "not needed here"
    monkeypatch.setattr(utils, name, None, raising=False)
    assert status("packed_batch_without_te", VERSION) == "applied"
    batches.cut_without_transformer_engine()
    for rank in (0, 1):
        group = types.SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        batch = {**packed_batch(), "cu_seqlens": torch.tensor([OFFSETS]), "cu_seqlens_padded": None}
        cut = getattr(utils, name)(batch, cp_group=group)
        assert cut["tokens"].tolist() == [ROWS[rank]]
        assert cut["cu_seqlens"].tolist() == [OFFSETS]
    monkeypatch.setattr(utils, "tex", object())
    assert status("packed_batch_without_te", VERSION) == "not needed here"


@pytest.mark.parametrize("name", batches.CUT_BATCH)
def test_batches_are_cut_over_context_parallel_ranks_without_a_group(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From 0.18 on None was the whole world, for torch.distributed."""
    seen = []

    def cut(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
        seen.append(cp_group)
        return batch

    for each in batches.CUT_BATCH:
        monkeypatch.delattr(utils, each, raising=False)
    assert status("batch_without_group", VERSION) == "not needed here"
    monkeypatch.setattr(utils, name, cut, raising=False)
    assert status("batch_without_group", VERSION) == "applied"
    groups = iter(["the context-parallel one", None])  # the latter where Megatron has made none
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda check_initialized: next(groups))
    batches.cut_over_context_parallel_ranks()
    for given in ({}, {"cp_group": None}, {"cp_group": "another"}):
        getattr(utils, name)({}, **given)
    assert seen == ["the context-parallel one", None, "another"]


# ------------------------------------------------------------------------------------------ checkpoints, on CPUs only


def _repaired(rank: int, on_cpus: bool) -> set[str]:
    """Return the names of what `install()` repairs."""
    from burst_plugin.megatron import install

    if on_cpus:
        cpu.enable(force=True)
    names = {line.split()[1].rstrip(":") for line in install().report if line.startswith("repaired ")}
    return names & {repair.name for repair in CPU_REPAIRS}


def test_repairs_that_only_cpus_need_are_applied_there_alone() -> None:
    assert run_ranks(_repaired, 1, False) == [set()]
    assert {"resume_without_te", "resume_in_float32"} <= run_ranks(_repaired, 1, True)[0]


def test_a_new_optimizer_has_a_step_while_it_is_asked_and_each_parameter_its_own_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins that do to the inner optimizer what Megatron does; real checkpoints are in test_interplay.py."""
    asked = []

    def state_dict(optimizer: Any) -> dict[str, float]:
        (step,) = {float(state["step"]) for state in optimizer.optimizer.state.values()}
        asked.append(step)
        return {"step": step}

    def load_state_dict(optimizer: Any, state_dict: Any) -> None:
        shared = torch.tensor(0.0)
        for name in ("weight", "bias"):
            optimizer.optimizer.state[name] = {"step": shared, "exp_avg": torch.ones(2)}

    monkeypatch.setattr(DistributedOptimizer, "state_dict", state_dict)
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", load_state_dict)
    apply_one("resume_without_te")
    inner = types.SimpleNamespace(state={})
    optimizer = types.SimpleNamespace(optimizer=inner)
    DistributedOptimizer.state_dict(optimizer)
    assert asked == [0.0]
    assert inner.state == {}
    DistributedOptimizer.load_state_dict(optimizer, {"optimizer": {"param_groups": [{"step": 7}, {"step": 7}]}})
    assert [float(state["step"]) for state in inner.state.values()] == [7.0, 7.0]
    inner.state["weight"]["step"] += 1
    assert float(inner.state["bias"]["step"]) == 7.0
    inner.state["bias"]["step"] += 1
    assert DistributedOptimizer.state_dict(optimizer) == {"step": 8.0}


def test_float32_parameters_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))

    def load_state_dict(optimizer: Any, state_dict: Any) -> None:
        weight.view(-1)[:2].copy_(torch.ones(2))  # the optimizer's shard is a view of the model's parameter

    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", load_state_dict)
    with pytest.raises(RuntimeError, match="in-place"):
        DistributedOptimizer.load_state_dict(None, {})
    apply_one("resume_in_float32")
    DistributedOptimizer.load_state_dict(None, {})
    assert weight.tolist() == [1.0, 1.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------------------- experts, on CPUs only


def test_the_router_of_experts_needs_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    assert status("router_without_te", (0, 16, 1)) == "applied"
    assert status("router_without_te", (0, 17, 0)) == "not needed since 0.17.0"
    inputs, weight = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(NameError):
        moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    monkeypatch.setattr(moe_utils, "te_general_gemm", "to be set", raising=False)
    apply_one("router_without_te")
    logits = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    torch.testing.assert_close(logits, inputs @ weight.T)
    assert status("router_without_te", (0, 16, 1)) == "not needed here"


# -------------------------------------------------------------------------------------------- packed_token_prediction


def _rolled(rank: int, cp: int) -> torch.Tensor:
    """What multi-token prediction makes of 40 tokens in documents of 16 and 24, of which 13 and 20 are real."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from burst_plugin.megatron import install

    install()
    starts, real = torch.tensor([0, 16, 40]), torch.tensor([0, 13, 33])
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=real, cu_seqlens_q_padded=starts)
    mine = packed_indices(starts, cp, rank)
    tokens = torch.arange(1, 41)[mine].unsqueeze(0)
    rolled, _ = roll_tensor(tokens, -1, -1, torch.distributed.group.WORLD, params)
    assert params.cu_seqlens_q is real
    whole = torch.zeros(40, dtype=torch.int64)
    whole[mine] = rolled[0]
    return whole


@pytest.mark.parametrize("cp", [1, 2])
def test_padded_documents_are_rolled_where_they_are(cp: int) -> None:
    expected = torch.tensor([*range(2, 17), 0, *range(18, 41), 0])
    assert torch.equal(sum(run_ranks(_rolled, cp, cp)), expected)


# ------------------------------------------------------------------------------------ token_prediction_without_labels


def last_tokens_labelled(data: Iterator[dict[str, torch.Tensor]], model: Any, count: int) -> tuple[torch.Tensor, Any]:
    """A microbatch with labels in the last tokens only, up to 4, all of which rank 0 has."""
    batch = next(data)
    batch["loss_mask"][:, : batch["loss_mask"].shape[1] - count] = 0
    batch = cut_batch(batch)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss_of, mask)


def _labelled_last(rank: int, count: int) -> list[str]:
    """The parameters whose gradients are not finite."""
    run = GptRun(layers=2, cp=2, cp_comm_type="burst", config={"mtp_num_layers": 1})
    result = one_step(run, random_tokens(run), partial(last_tokens_labelled, count=count))
    return [name for name, grad in result.grads.items() if not bool(grad.isfinite().all())]


@pytest.mark.parametrize("count", [4, 0])
def test_token_prediction_on_ranks_without_labels_has_gradients(count: int) -> None:
    assert run_ranks(_labelled_last, 2, count) == [[], []]


# -------------------------------------------------------------------------------------------------------- yarn_tables


def _tables(rank: int) -> list[bool]:
    """Whether tables are those of the length asked for, longer and shorter ones before."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    build(GptRun(layers=2, cp=2, cp_comm_type="burst"))
    group = parallel_state.get_context_parallel_group()
    options = {"original_max_position_embeddings": 64, "use_cpu_initialization": True, "cp_group": group}
    embedding = YarnRotaryEmbedding(8, 1.0, **options)
    found = []
    for length in (32, 64, 16, 16, 128):
        cos, _ = embedding.get_cached_cos_sin(length)
        angles, scale = embedding.forward(length)
        found.append(torch.equal(cos, angles.cos() * scale))
    longest, _ = embedding.get_cached_cos_sin(64, packed_seq=True)
    shorter, _ = embedding.get_cached_cos_sin(16, packed_seq=True)
    angles, scale = embedding.forward(16, packed_seq=True)
    found.append(torch.equal(shorter, angles.cos() * scale))
    found.append(shorter.data_ptr() == longest.data_ptr())  # not cut: nothing is made anew
    return found


def test_tables_of_positions_are_those_of_the_length() -> None:
    assert run_ranks(_tables, 2) == [[True] * 7] * 2


# -------------------------------------------------------------------------------------------------- packed_mla_values


def test_values_are_filled_up_for_other_core_attention_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled_up(layer: Any, query: torch.Tensor, value: torch.Tensor | None, packed: Any) -> Any:  # as from 0.18 on
        if value is None or packed is None:
            return value, False, None, None
        missing = query.shape[-1] - value.shape[-1]
        return torch.nn.functional.pad(value, [0, missing]), True, value.shape[-1], query.shape[-1]

    monkeypatch.setattr(multi_latent_attention, FILLS_UP, filled_up, raising=False)
    assert status("packed_mla_values", (0, 18, 2)) == "applied"
    apply_one("packed_mla_values")
    prepare = getattr(multi_latent_attention, FILLS_UP)
    query, value = torch.zeros(4, 2, 24), torch.zeros(4, 2, 16)
    ours = types.SimpleNamespace(core_attention=object.__new__(BurstCoreAttention))
    assert prepare(ours, query, value, "packed") == (value, False, 16, 16)
    assert prepare(ours, query, None, "packed") == (None, False, None, None)
    other, *rest = prepare(types.SimpleNamespace(core_attention=object()), query, value, "packed")
    assert (other.shape[-1], rest) == (24, [True, 16, 24])
    monkeypatch.delattr(multi_latent_attention, FILLS_UP)
    assert status("packed_mla_values", (0, 16, 1)) == "not needed here"


# --------------------------------------------------------------------------------------------------- weights_at_start


def _scripts_that_draw(numbers: int) -> Any:
    """A stand-in for `megatron.training.initialize`, whose warm-up draws so many numbers."""
    found = {name: types.ModuleType(name) for name in ("megatron.training", "megatron.training.initialize")}
    for name, module in found.items():
        module.__spec__ = ModuleSpec(name, None)
    vars(found["megatron.training.initialize"])["_warmup_jit_function"] = lambda: torch.rand(numbers, device="cuda")
    sys.modules.update(found)
    return found["megatron.training.initialize"]


def _weights_at_start(rank: int, cp: int) -> dict[str, torch.Tensor]:
    """Of a model whose router and positions draw from the generator that everything outside of layers has."""
    run = GptRun(layers=2, cp=cp, cp_comm_type="burst", config=EXPERTS)
    scripts = _scripts_that_draw(run.seq_length // cp)
    join(run)
    torch.manual_seed(1234)
    scripts._warmup_jit_function()
    model = GPTModel(
        transformer_config(run),
        get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"),
        vocab_size=run.vocab,
        max_sequence_length=run.seq_length,
        position_embedding_type="learned_absolute",
    )
    leave()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_weights_start_alike_with_any_context_parallel_size() -> None:
    (one,) = run_ranks(_weights_at_start, 1, 1)
    drawn = {name for name, weight in one.items() if weight.unique().numel() > 1}
    assert {"embedding.position_embeddings.weight", "decoder.layers.0.mlp.router.weight"} <= drawn
    for cp in (2, 4):
        for weights in run_ranks(_weights_at_start, cp, cp):
            assert weights.keys() == one.keys()
            assert all(torch.equal(weights[name], one[name]) for name in one)


def test_a_gpus_random_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator().manual_seed(5)
    for name, answer in {
        "is_available": lambda: True,
        "get_rng_state": gpu.get_state,
        "set_rng_state": gpu.set_state,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    scripts = types.SimpleNamespace(_warmup_jit_function=lambda: (torch.rand(3), torch.rand(3, generator=gpu)))
    monkeypatch.setitem(sys.modules, "megatron.training.initialize", scripts)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda: "groups")
    apply_one("weights_at_start")
    for _ in range(2):  # groups may be made again
        assert parallel_state.initialize_model_parallel() == "groups"
        before = torch.get_rng_state(), gpu.get_state()
        scripts._warmup_jit_function()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(gpu.get_state(), before[1])


def test_without_scripts_nothing_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    assert status("weights_at_start", VERSION) == "not needed here"
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda: "groups")
    apply_one("weights_at_start")
    assert parallel_state.initialize_model_parallel() == "groups"
