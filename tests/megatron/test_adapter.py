"""The hook: which layers get the ring, from which specs, with which groups; and what a forward refuses."""

from __future__ import annotations

import types
import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from burst_plugin import Causal, Strategy
from tests.support.megatron_gpt import GptRun, batches, build, forward_step, leave, one_step, random_tokens
from tests.support.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.megatron

CP2 = GptRun(layers=2, cp=2, cp_comm_type="burst")
CP4 = GptRun(layers=2, cp=4, hierarchical=(2, 2), cp_comm_type="burst")


def _core_attentions(model: torch.nn.Module) -> list[str]:
    return [type(m).__name__ for name, m in model.named_modules() if name.endswith("core_attention")]


def _install_report(rank: int) -> tuple[str, bool, list[str], list[str]]:
    from burst_plugin.megatron import install

    adapter = install()
    model = build(CP4)
    (cp,) = adapter.contexts()
    made = cp.describe()
    again = install() is adapter
    errors = []
    for strategy in (Strategy(head_chunk=2), Strategy(backward="q")):
        try:
            install(strategy)
        except ValueError as error:
            errors.append(str(error))
    kinds = _core_attentions(model)
    leave()
    assert adapter.contexts() == []
    return f"{adapter}\n{made['schedule']} {made['topology']}", again, errors, kinds


def test_install_is_explicit_idempotent_and_says_what_it_did() -> None:
    for report, again, errors, kinds in run_ranks(_install_report, 4):
        assert 'layers with cp_comm_type="burst"' in report
        assert "two_level_ring 2x2" in report
        assert again
        assert errors[0].startswith("head_chunk=2 is for models of transformers; Megatron's layers project all heads")
        assert errors[1].startswith("already installed with")
        assert kinds == ["BurstCoreAttention"] * 2


def _strategy(rank: int) -> str:
    from burst_plugin.megatron import install

    adapter = install(Strategy(schedule="flat_ring"))
    build(CP4)
    return adapter.contexts()[0].describe()["schedule"]


def test_the_installed_strategy_is_used() -> None:
    assert run_ranks(_strategy, 4) == ["flat_ring"] * 4


class LikeTransformerEngines(torch.nn.Module):
    """A core attention that a spec names by class, as Transformer Engine's specs do."""

    burst_may_replace = True

    def __init__(self, config: Any, layer_number: int, cp_comm_type: str | None = None, **options: Any) -> None:
        super().__init__()
        self.cp_comm_type = cp_comm_type


def _any_spec(rank: int, cp_comm_type: Any) -> list[tuple[str, str | None]]:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import TransformerLayer, transformer_block

    from burst_plugin.megatron import install

    install()
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = LikeTransformerEngines
    assert spec.module is TransformerLayer
    original = gpt_layer_specs.get_gpt_layer_local_spec
    gpt_layer_specs.get_gpt_layer_local_spec = lambda **options: spec
    try:
        model = build(replace(CP2, cp_comm_type=cp_comm_type))
    finally:
        gpt_layer_specs.get_gpt_layer_local_spec = original
    assert spec.submodules.self_attention.submodules.core_attention is LikeTransformerEngines, "specs are not changed"
    assert transformer_block is not None
    found = [m for name, m in model.named_modules() if name.endswith("core_attention")]
    leave()
    return [(type(m).__name__, getattr(m, "cp_comm_type", None)) for m in found]


@pytest.mark.parametrize(
    ("cp_comm_type", "expected"),
    [
        ("burst", [("BurstCoreAttention", None)] * 2),
        ("p2p", [("LikeTransformerEngines", "p2p")] * 2),
    ],
)
def test_the_hook_works_for_specs_that_name_another_attention(cp_comm_type: str, expected: Any) -> None:
    assert run_ranks(_any_spec, 2, cp_comm_type) == [expected] * 2


def _build_with(rank: int, config: dict[str, Any]) -> None:
    build(replace(CP2, config=config))


def test_each_layer_has_its_own_cp_comm_type() -> None:
    from burst_plugin.megatron.layers.building import ChosenCoreAttention

    listed = types.SimpleNamespace(context_parallel_size=2, cp_comm_type=["p2p", "burst"])
    options = {"config": listed, "layer_number": 1, "original": LikeTransformerEngines, "registry": None}
    assert type(ChosenCoreAttention(cp_comm_type="p2p", **options)) is LikeTransformerEngines


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"flash_decode": True}, "flash_decode=True is not supported: it is for inference"),
        (
            {"window_size": (-2, 0)},
            "window_size=(-2, 0) is not valid: use a pair (left, right), each 0 or more, or -1 for no bound",
        ),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0 is not valid: use a share from 0 to below 1"),
    ],
    ids=str,
)
def test_unsupported_options_stop_every_rank_when_the_model_is_built(config: dict[str, Any], message: str) -> None:
    for outcome in run_ranks_outcomes(_build_with, 2, config):
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        assert "burst attention cannot run layer 1: " in last
        assert message in last


def _forward_with(rank: int, kind: str) -> list[str]:
    """What each of some calls of a layer raises."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    run = replace(CP2, microbatch_size=1)
    model = build(run)
    layer = model.module.decoder.layers[0]
    core = layer.self_attention.core_attention
    q = torch.randn(32, 1, 8, 8)
    k = torch.randn(32, 1, 4, 8)
    causal = torch.ones(64, 64, dtype=torch.bool).triu(1)
    from burst_plugin.sequence.layout import LAYOUTS, Tokens, positions

    rows = positions(LAYOUTS["zigzag"].runs(rank, 2, Tokens(64)))
    assert core(q, k, k, causal[rows].view(1, 1, 32, 64)).shape == (32, 1, 64)
    documents = causal.clone()
    documents[40:, :40] = True  # what --reset-attention-mask makes
    calls = {
        "documents": lambda: core(q, k, k, documents[rows].view(1, 1, 32, 64)),
        "whole mask": lambda: core(q, k, k, causal.view(1, 1, 64, 64)),
        "padding": lambda: core(q, k, k, None, attn_mask_type=AttnMaskType.padding),
        "bias": lambda: core(q, k, k, None, attention_bias=torch.zeros(1, 1, 32, 32)),
        "packed": lambda: core(q, k, k, None, packed_seq_params=PackedSeqParams()),
        "unknown": lambda: core(q, k, k, None, indices=torch.zeros(1), num_splits=None),
        "inference": lambda: layer(
            torch.zeros(32, 1, 64), None, inference_context=StaticInferenceContext(1, run.seq_length)
        ),
        "inference params": lambda: layer(torch.zeros(32, 1, 64), None, inference_params=object()),
    }
    errors = []
    for _ in range(2):  # what was refused once is refused again
        try:
            calls[kind]()
            errors.append("nothing was raised")
        except ValueError as error:
            errors.append(str(error))
    leave()
    return errors


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("documents", "is not the Causal() that attn_mask_type says; to keep documents apart pack them"),
        ("whole mask", "attention_mask [1, 1, 64, 64] is not the Causal()"),
        ("padding", "attn_mask_type=padding needs an attention_mask, or packed_seq_params; got neither"),
        (
            "bias",
            "bias must be floating point [1 or batch, 1 or query heads, local queries, all keys]",
        ),
        ("unknown", "burst attention cannot run layer 1: it was given indices, which it does not know"),
        ("packed", "packed_seq_params.qkv_format=None is not supported; use 'thd', or 'sbhd'"),
        (
            "inference",
            "inference with context_parallel_size=2 and cp_comm_type='burst' is for GPTModel",
        ),
        ("inference params", "use context_parallel_size=1 for other models"),
    ],
)
def test_what_a_forward_cannot_honour_is_refused(kind: str, message: str) -> None:
    for errors in run_ranks(_forward_with, 2, kind):
        assert all(message in error for error in errors)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on one."""

    is_cuda = True


def test_masks_on_gpus_are_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same calls on every rank, whichever tensors they come with; and all of them if so asked."""
    from burst_plugin.megatron import registry as module

    looked = mock.Mock()
    monkeypatch.setattr(module, "check_same", looked)
    for check, expected in (("auto", [1, 2, 4, 8]), ("always", [1])):
        registry, cp = module.Registry(None), mock.Mock(strategy=Strategy(check=check))
        for _ in range(2):
            tensor = torch.zeros(1).as_subclass(OnGpu)
            seen = []
            for call in range(1, 9):
                looked.reset_mock()
                registry.check_mask(cp, tensor, Causal(), layer=call)
                seen += [call] * looked.call_count
            assert seen == expected
            registry.clear()


def _rebuild(rank: int) -> list[float]:
    """Groups made, destroyed and made again, in another shape too."""
    tokens = random_tokens(CP4)
    return [one_step(run, tokens).loss for run in (CP4, replace(CP4, hierarchical=None), CP4, replace(CP2, tp=2))]


def test_rings_come_and_go_with_megatrons_groups() -> None:
    for losses in run_ranks(_rebuild, 4):
        assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def _evaluation(rank: int) -> tuple[float, float]:
    """Loss in training and, without gradients, in evaluation."""
    model = build(CP2)
    with torch.no_grad():
        model.eval()
        losses, _ = forward_step(batches(random_tokens(CP2)), model)
        evaluated = float(losses.sum())
    model.train()
    losses, _ = forward_step(batches(random_tokens(CP2)), model)
    return evaluated, float(losses.sum())


def test_evaluation_without_gradients_is_no_inference() -> None:
    for evaluated, trained in run_ranks(_evaluation, 2):
        assert evaluated == trained


def _own_core(rank: int) -> str:
    LikeTransformerEngines.burst_may_replace = False
    with pytest.raises(ValueError, match="a core attention of its own") as raised:
        _any_spec(rank, "burst")
    leave()
    return str(raised.value)


def test_a_core_attention_of_ones_own_is_not_replaced_without_a_word() -> None:
    for said in run_ranks(_own_core, 2):
        assert said.startswith("layer 1 has a core attention of its own, ")
        assert "set LikeTransformerEngines.burst_may_replace = True" in said


def test_packed_multimodal_positions_are_refused_where_megatron_cuts_them() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

    from burst_plugin.megatron.layers.building import refuse_packed_mrope

    def preprocess(model: Any, input_ids: Any, packed_seq_params: Any = None) -> str:
        return "went on"

    config = types.SimpleNamespace(context_parallel_size=2, cp_comm_type="burst")
    packed = types.SimpleNamespace(qkv_format="thd")
    cut = types.SimpleNamespace(config=config, rotary_pos_emb=object.__new__(MultimodalRotaryEmbedding))
    own = types.SimpleNamespace(config=config, rotary_pos_emb=object())
    with pytest.raises(ValueError, match="position_embedding_type='mrope' is not supported with packed sequences"):
        refuse_packed_mrope(preprocess, cut, None, packed_seq_params=packed)
    assert refuse_packed_mrope(preprocess, cut, None) == "went on"
    assert refuse_packed_mrope(preprocess, own, None, packed) == "went on", "it cuts them itself"


def test_a_core_attention_of_ones_own_may_be_anything_a_spec_names() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    from burst_plugin.megatron.layers.building import check_replaceable

    check_replaceable(
        ModuleSpec(module=("megatron.core.transformer.dot_product_attention", "DotProductAttention")), 1
    )
    usual = ("megatron.core.transformer.dot_product_attention", "DotProductAttention")
    for given in (
        ModuleSpec(module=usual, params={"attention_dropout": 0.0}),
        partial(import_module(usual), attention_dropout=0.0),
    ):
        with pytest.raises(
            ValueError, match="layer 3 gives its core attention options in its spec, attention_dropout"
        ):
            check_replaceable(given, 3)
    with pytest.raises(ValueError, match=r"layer 1 has a core attention of its own, functools\.lru_cache"):
        check_replaceable(ModuleSpec(module=("functools", "lru_cache")), 1)
    other = ("megatron.core.transformer.multi_latent_attention", "MLASelfAttention")  # DSAttention, in later releases
    with pytest.raises(ValueError, match=r"layer 1 has a core attention of its own, megatron\.core\."):
        check_replaceable(ModuleSpec(module=other), 1)


def test_an_attention_that_is_neither_self_nor_cross_attention_is_told_of() -> None:
    """As the full attention of Megatron-Bridge's WAN: it computes what its spec says."""
    from burst_plugin.megatron.layers.building import choose_core_attention
    from burst_plugin.megatron.registry import Registry

    def spec(core: Any = "core") -> Any:
        return types.SimpleNamespace(module=object, submodules=types.SimpleNamespace(core_attention=core))

    built: list[Any] = []

    def init(layer: Any, config: Any, submodules: Any) -> None:
        built.append(submodules)

    config = types.SimpleNamespace(context_parallel_size=2, cp_comm_type="burst")
    registry = Registry(None)
    layer, usual = torch.nn.Module(), {"self_attention": spec(), "cross_attention": None, "mlp": object()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_core_attention(registry, init, layer, config, types.SimpleNamespace(**usual))
    submodules = types.SimpleNamespace(**usual, full_self_attention=spec("its own"))
    with pytest.warns(UserWarning, match="full_self_attention of a layer is not on the ring"):
        choose_core_attention(registry, init, layer, config, submodules)
    assert built[1].self_attention.submodules.core_attention.params["original"] == "core"
    assert built[1].full_self_attention.submodules.core_attention == "its own"


def _groups_made_again(rank: int) -> list[int]:
    from megatron.core import parallel_state

    from burst_plugin.megatron import install

    adapter, found = install(), []
    for _ in range(2):
        build(CP2)
        found.append(len(adapter.contexts()))
        parallel_state.destroy_model_parallel.__wrapped__()  # as what was imported before the plugin destroys them
    return found


def test_rings_of_groups_that_were_destroyed_unseen_go_when_others_are_made() -> None:
    assert run_ranks(_groups_made_again, 2) == [[1, 1]] * 2


def test_groups_that_microbatches_bring_replace_no_core_attention_of_ones_own() -> None:
    """Megatron hands on no cp_comm_type then."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from burst_plugin.megatron.layers.building import ChosenCoreAttention

    config = types.SimpleNamespace(context_parallel_size=1, hybrid_context_parallel=True, cp_comm_type="burst")
    own = ModuleSpec(module=("functools", "lru_cache"))
    with pytest.raises(ValueError, match="layer 1 has a core attention of its own"):
        ChosenCoreAttention(original=own, registry=None, config=config, layer_number=1)


def test_layers_that_know_no_groups_of_microbatches_are_refused_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from burst_plugin.megatron.layers import building
    from burst_plugin.megatron.layers.building import refuse_mamba, refuse_other_mixers
    from burst_plugin.megatron.registry import Registry

    config = types.SimpleNamespace(context_parallel_size=1, hybrid_context_parallel=True, cp_comm_type="burst")
    plain = types.SimpleNamespace(context_parallel_size=2, cp_comm_type="burst")
    delta_net = types.SimpleNamespace(self_attention=ModuleSpec(module=torch.nn.Linear))
    with pytest.raises(ValueError, match="Linear layers are not supported with hybrid_context_parallel"):
        refuse_other_mixers(config, "zigzag", delta_net)
    refuse_other_mixers(config, "zigzag", types.SimpleNamespace(self_attention=IdentityOp))
    refuse_other_mixers(plain, "zigzag", delta_net)
    built = []
    for mixer in (MambaMixer, torch.nn.Linear):
        mamba = types.SimpleNamespace(mixer=ModuleSpec(module=mixer))
        with pytest.raises(
            ValueError, match=f"{mixer.__name__} layers are not supported with hybrid_context_parallel"
        ):
            refuse_mamba(Registry(None), lambda *given: built.append(given), None, config, mamba)
        refuse_mamba(Registry(None), lambda *given: built.append(given), None, plain, mamba)
    with pytest.raises(ValueError, match="Linear layers are not supported with layout='auto'"):
        refuse_mamba(Registry(Strategy(layout="auto")), lambda *given: built.append(given), None, plain, mamba)
    monkeypatch.setattr(building, "resets_attention_mask", lambda: True)
    with pytest.raises(ValueError, match="Linear layers are not supported with --reset-attention-mask"):
        refuse_mamba(Registry(None), lambda *given: built.append(given), None, plain, mamba)
    mamba = types.SimpleNamespace(mixer=ModuleSpec(module=MambaMixer))
    refuse_mamba(Registry(Strategy(layout="auto")), lambda *given: built.append(given), None, plain, mamba)
    assert len(built) == 3


def test_packed_sequences_on_other_ranks_than_the_layers_are_refused() -> None:
    """Megatron rotates them by the layer's own group, to wrong positions."""
    from burst_plugin.megatron.layers.core_attention import BurstCoreAttention

    def group(size: int) -> Any:
        return types.SimpleNamespace(size=lambda: size, rank=lambda: 0)

    layer = types.SimpleNamespace(pg_collection=types.SimpleNamespace(cp=group(1)))
    ring = types.SimpleNamespace(ranks=2, rank=0)
    with pytest.raises(ValueError, match="hybrid_context_parallel needs qkv_format='sbhd'"):
        BurstCoreAttention.check_packed_group(layer, ring)  # type: ignore[arg-type]
    layer.pg_collection.cp = group(2)
    BurstCoreAttention.check_packed_group(layer, ring)  # type: ignore[arg-type]
