"""Models of transformers whose layers carry a state along the sequence: a ring against one rank without it.

Documents of a packed batch, and rows padded on the left, are compared with each text alone: transformers itself lets
states pass from one document to the next, and from padding to text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from burst_plugin import ContextParallel, recurrent
from burst_plugin.batch import as_given, shard_batch
from burst_plugin.huggingface import prepare
from burst_plugin.huggingface.models import problems
from burst_plugin.huggingface.recurrent.families import MIXERS, mixers
from tests.support.deepspeed_run import Batch, draw, llama, worst
from tests.support.families import NEWER
from tests.support.hybrids import build, hybrids
from tests.support.ranks import run_ranks
from tests.support.ring_steps import (
    Step,
    documents,
    grads_of,
    masked,
    over_ranks,
    over_texts,
    packed,
    padded,
    shifted,
    step,
    sum_of_losses,
)

pytestmark = pytest.mark.huggingface

FAMILIES = hybrids()
CACHE = "cache" if NEWER else "past_key_values"
DOCUMENTS = (13, 1, 18)
FEW = [
    name
    for name in ("qwen3_next", "kimi_linear", "falcon_h1", "mamba", "zamba", "minimax", "recurrent_gemma", "rwkv")
    if name in FAMILIES
] + [name for name in ("xlstm", "lfm3", "zaya") if name in FAMILIES]


def _plain() -> Batch:
    return draw(1, rows=2, length=32)[0]


def _torn() -> Batch:
    """With padding between the tokens of a row, where states decay as they do at any token."""
    batch = draw(1, rows=2, length=32, seed=3)[0]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 9:14] = mask[1, 20] = 0
    return masked(batch, mask)


BATCHES = {
    "plain": _plain(),
    "packed": packed(DOCUMENTS, seed=1),
    "padded": padded(),
    "torn": _torn(),
    "checkpointed": packed(DOCUMENTS, seed=1),
    "cached": _plain(),
}


def _on_ring(rank: int, names: Sequence[str]) -> dict[tuple[str, str], Step]:
    """Losses and gradients of all batches; gradients on the first rank alone."""
    cp, found = ContextParallel(dist.group.WORLD, keep_attention="all"), {}
    for name in names:
        model = prepare(build(FAMILIES[name]))
        for kind, batch in BATCHES.items():
            model.gradient_checkpointing_disable()
            if kind == "checkpointed":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            local = shard_batch(batch, cp)
            labels = local.pop("shift_labels")
            cached = {} if kind == "cached" else {"use_cache": False}
            found[name, kind] = over_ranks(*step(model, sum_of_losses(model(**local, **cached).logits, labels)))
    return found


def _texts(kind: str, batch: Batch) -> list[Batch]:
    """What is computed by itself: documents of a packed batch, rows without their padding, or the whole batch."""
    if kind == "padded":
        rows = enumerate(batch["attention_mask"].bool())
        return [{name: batch[name][row : row + 1, real] for name in ("input_ids", "labels")} for row, real in rows]
    return documents(batch)


def _on_one_rank(name: str, kind: str) -> Step:
    model = build(FAMILIES[name])
    return over_texts(_alone(model, text) for text in _texts(kind, BATCHES[kind]))


def _alone(model: Any, text: Batch) -> Step:
    inputs = {each: x for each, x in text.items() if each != "labels"}
    return step(model, sum_of_losses(model(**inputs, use_cache=False).logits, shifted(text["labels"])))


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, str], Step]:
    return {(name, kind): _on_one_rank(name, kind) for name in FAMILIES for kind in BATCHES}


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, tuple(FAMILIES)), (2, tuple(FAMILIES)), (4, FEW)], ids=["1", "2", "4"]
)
def test_losses_and_gradients_equal_those_of_one_rank(
    ranks: int, names: Sequence[str], truths: dict[tuple[str, str], Step]
) -> None:
    found = run_ranks(_on_ring, ranks, names, timeout_s=300.0)[0]
    failed = []
    for key, (loss, grads) in found.items():
        truth = truths[key]
        error, parameter = worst(grads, truth[1])
        if abs(loss - truth[0]) > 1e-5 * truth[0] or not error <= 1e-5:
            failed.append((*key, loss, truth[0], parameter, error))
    assert not failed


def _two_batches(rank: int, names: Sequence[str], reentrant: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of two batches whose layers are computed again after both have gone forward."""
    cp, found = ContextParallel(dist.group.WORLD), {}
    for name in names:
        model = prepare(build(FAMILIES[name]))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        losses = []
        for kind in ("packed", "padded"):
            local = shard_batch(BATCHES[kind], cp)
            labels, logits = local.pop("shift_labels"), model(**local, use_cache=False).logits
            losses.append(sum_of_losses(logits, labels))
        for loss in losses:
            loss.backward()
        grads = grads_of(model)
        for grad in grads.values():
            dist.all_reduce(grad)
        found[name] = {} if rank else grads
    return found


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_layers_are_computed_again_in_the_forward_that_they_were_in(
    reentrant: bool, truths: dict[tuple[str, str], Step]
) -> None:
    names = [name for name in ("jamba", "bamba", *FEW) if name in FAMILIES]
    for name, grads in run_ranks(_two_batches, 2, names, reentrant, timeout_s=240.0)[0].items():
        ours, others = truths[name, "packed"][1], truths[name, "padded"][1]
        error, parameter = worst(grads, {each: grad + others[each] for each, grad in ours.items()})
        assert error <= 1e-5, (name, parameter, error)


def _evaluated(rank: int, names: Sequence[str]) -> dict[str, tuple[torch.Tensor, bool]]:
    """Logits of a whole batch, and whether there is a cache, which would be that of a shard."""
    cp, found = ContextParallel(dist.group.WORLD), {}
    for name in names:
        model = prepare(build(FAMILIES[name])).eval()
        local = shard_batch({"input_ids": _plain()["input_ids"]}, cp)
        with torch.no_grad():
            output = model(**local, use_cache=True)
        has_cache = any(output.get(key) is not None for key in ("cache", "cache_params", "past_key_values", "state"))
        found[name] = local["burst"].unshard(output.logits), has_cache
    return found


def test_evaluation_of_shards_makes_no_caches() -> None:
    names = [name for name in FEW if name != "zaya"]
    by_rank = run_ranks(_evaluated, 2, names, timeout_s=120.0)
    for name in names:
        with torch.no_grad():
            output = build(FAMILIES[name]).eval()(_plain()["input_ids"], use_cache=False)
        for logits, has_cache in (found[name] for found in by_rank):
            torch.testing.assert_close(logits, output.logits, rtol=2e-5, atol=2e-5, msg=name)
            assert not has_cache, name


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_batches_are_computed_and_texts_generated_as_ever(name: str) -> None:
    eager = build(FAMILIES[name]).eval()
    ring = prepare(copy.deepcopy(eager))
    batch = {each: x for each, x in padded().items() if each != "labels"}
    usual = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "use_cache": name != "xlstm"}
    with torch.no_grad():
        real = batch["attention_mask"].bool()
        expected, logits = (model(**batch, use_cache=False).logits[real] for model in (eager, ring))
        words, written = (model.generate(batch["input_ids"][2:, :16], **usual) for model in (eager, ring))
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(words, written)


def test_a_ring_of_one_rank_with_the_whole_batch_as_it_was_given() -> None:
    for name in FEW:
        eager = build(FAMILIES[name])
        ring = prepare(copy.deepcopy(eager))
        batch = {each: x for each, x in _torn().items() if each != "labels"}
        found = ring(**as_given(batch, ContextParallel()), use_cache=False).logits
        real = batch["attention_mask"].bool()
        expected = eager(**batch, use_cache=False).logits
        torch.testing.assert_close(found[real], expected[real], rtol=2e-5, atol=2e-5, msg=name)


def test_packed_documents_are_apart_on_a_ring_of_one_rank_too() -> None:
    for name in FEW:
        eager = build(FAMILIES[name])
        ring = prepare(copy.deepcopy(eager))
        batch = {each: x for each, x in packed(DOCUMENTS, seed=1).items() if each != "labels"}
        found = ring(**as_given(batch, ContextParallel()), use_cache=False).logits
        each = [eager(text["input_ids"], use_cache=False).logits for text in documents(BATCHES["packed"])]
        torch.testing.assert_close(found, torch.cat(each, 1), rtol=2e-5, atol=2e-5, msg=name)


def test_fused_functions_are_left_to_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("mamba2", "mamba2_split_conv1d_scan_combined"), ("mamba", "mamba_inner_fn")):
        home = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[function])
        monkeypatch.setattr(home, function, lambda x, *args, **kwargs: x.new_zeros(2, 32, 32))
        ring = prepare(build(FAMILIES[name]))
        whole = ring(_plain()["input_ids"]).logits
        cut = ring(**shard_batch(_plain(), ContextParallel())).logits
        assert (whole - cut).abs().max() > 0.1, name


@pytest.mark.parametrize(
    "options", [{"mlp_chunk": 5}, {"head_chunk": 2}, {"loss_chunk": 7}, {"offload": True}], ids=str
)
def test_the_rest_of_a_model_runs_in_chunks_as_ever(
    options: dict[str, Any], truths: dict[tuple[str, str], Step]
) -> None:
    for name in ("qwen3_5", "falcon_h1", "lfm2" if "mlp_chunk" in options else "zamba2"):
        model = prepare(build(FAMILIES[name]))
        if "offload" in options:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        local = shard_batch(packed(DOCUMENTS, seed=1), ContextParallel(**options))
        loss = model(**local, labels=local["shift_labels"], num_items_in_batch=1, use_cache=False).loss
        loss.backward()
        truth = truths[name, "packed"]
        error, parameter = worst({each: p.grad for each, p in model.named_parameters()}, truth[1])
        assert abs(float(loss.detach()) - truth[0]) <= 1e-5 * truth[0], (name, options)
        assert error <= 1e-5, (name, parameter, error)


# ------------------------------------------------------------------------------------------------------ refused


def test_layers_that_mix_tokens_are_no_mlps() -> None:
    """RWKV's feed-forward takes the token before as well."""
    model = prepare(build(FAMILIES["rwkv"]))
    with pytest.raises(ValueError, match="RwkvForCausalLM has no MLPs that mlp_chunk can cut into chunks of tokens"):
        model(**shard_batch(_plain(), ContextParallel(mlp_chunk=5)))


def test_layers_that_are_not_those_of_transformers_are_refused() -> None:
    own = build(FAMILIES["lfm2"])
    layer = mixers(own)[0][0]
    layer.__class__ = type("Lfm2ShortConv", (type(layer),), {"forward": lambda self, x, **kwargs: x})
    assert "its Lfm2ShortConv is not that of transformers" in "; ".join(problems(own))
    unknown = build(FAMILIES["lfm2"])
    layer = mixers(unknown)[0][0]
    layer.__class__ = type("Mixer", (torch.nn.Module,), {"forward": lambda self, x, **kwargs: x})
    assert "it carries a state along the sequence (in Mixer)" in "; ".join(problems(unknown))


class _Own(torch.nn.Module):
    """A layer behind an MLP: of a module of PyTorch, of two in a row, or of one that it gives the tokens before."""

    def __init__(self, module: torch.nn.Module, place: recurrent.Placement | None = None) -> None:
        super().__init__()
        self.module, self.place = module, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recurrent.with_tokens_before(self.module, x, 3, self.place)  # type: ignore[arg-type]


class _Plain(_Own):
    forward = torch.nn.Module.forward


class _InLambda(_Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda y: recurrent.with_tokens_before(self.module, y, 3, self.place))(x)  # type: ignore[arg-type]


def _mixed(layer: _Own, x: torch.Tensor) -> torch.Tensor:
    return recurrent.with_tokens_before(layer.module, x, 3, layer.place)  # type: ignore[arg-type]


class _ByHelper(_Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _mixed(self, x)


_after_others = recurrent.with_tokens_before


class _Renamed(_Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _after_others(self.module, x, 3, self.place)  # type: ignore[arg-type]


def _with_own_layer(layer: torch.nn.Module) -> Any:
    model = transformers.LlamaForCausalLM(llama(num_hidden_layers=2))
    for each in model.model.layers:
        each.mlp = torch.nn.Sequential(each.mlp, layer)
    return model


@pytest.mark.parametrize(
    "module",
    [
        *(kind(32, 32) for kind in (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN)),
        *(kind(32, 32, 4) for kind in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)),
        *(kind(32, 32, 4) for kind in (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)),
        *(torch.nn.ZeroPad2d((0, 0, 1, -1)), torch.nn.AvgPool1d(3, 1, 1), torch.nn.MaxPool1d(2)),
        *(torch.nn.BatchNorm1d(32), torch.nn.InstanceNorm1d(32), torch.nn.MultiheadAttention(32, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_own_layers_of_modules_that_mix_tokens_are_refused_by_name(module: torch.nn.Module) -> None:
    """In a model that says neither that it is stateful nor of what type its layers are."""
    name = rf"its layers\.0\.mlp\.1\.module \({type(module).__name__}\)"
    instead = {"MultiheadAttention": r"call burst_plugin\.burst_attention"}.get(
        type(module).__name__, "use LayerNorm" if "Norm" in type(module).__name__ else r"call burst_plugin\.recurrent"
    )
    with pytest.raises(ValueError, match=rf"{name} would join tokens, of which another .*; {instead}"):
        prepare(_with_own_layer(_Plain(module)))


def test_own_layers_that_mix_no_tokens_or_call_the_ring_are_accepted() -> None:
    for module in (torch.nn.GRUCell(32, 32), torch.nn.Conv1d(32, 32, 1), torch.nn.SyncBatchNorm(32)):
        assert problems(_with_own_layer(_Plain(module))) == []
    for kind in (_Own, _InLambda, _ByHelper, _Renamed):
        own = kind(torch.nn.Sequential(torch.nn.Conv1d(32, 32, 4, groups=32)), recurrent.Placement(ContextParallel()))
        assert problems(_with_own_layer(own)) == []
    stateful = _with_own_layer(own)
    stateful.config.layer_types = ["linear_attention", "full_attention"]
    assert problems(stateful) == []
    stateful.model.layers[1].mlp = _Plain(torch.nn.GRU(32, 32))
    assert "carries a state along the sequence (in _Plain) in a way that is not known" in "; ".join(
        problems(stateful)
    )


class _Around(torch.nn.Module):
    """A user's module, with a layer of its own beside a model of transformers."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.layer = transformers.LlamaForCausalLM(llama(num_hidden_layers=1)), layer


def test_own_modules_around_a_model_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    place = recurrent.Placement(ContextParallel())
    for layer in (torch.nn.Conv2d(3, 32, 4), torch.nn.Conv1d(32, 32, 1), _Own(torch.nn.Conv1d(32, 32, 4), place)):
        prepare(_Around(layer))
    assert not [str(each.message) for each in recwarn if "has not been examined" in str(each.message)]
    with pytest.warns(UserWarning, match=r"layer \(Conv1d\) of _Around is outside of its model .*; call burst_plug"):
        prepare(_Around(torch.nn.Conv1d(32, 32, 4)))


def test_layers_that_call_other_functions_than_is_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["mamba2"])
    monkeypatch.setitem(MIXERS, "Mamba2Mixer", MIXERS["Mamba2Mixer"]._replace(calls=("causal_conv1d_fn", "scan")))
    assert "its Mamba2Mixer does not use scan, as in the releases of transformers" in "; ".join(problems(model))


def test_functions_that_are_put_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(build(FAMILIES["lfm2"]))
    home = __import__("transformers.models.lfm2.modeling_lfm2", fromlist=["causal_conv1d_fn"])
    monkeypatch.setattr(home, "causal_conv1d_fn", home.causal_conv1d_fn.__wrapped__)
    with pytest.raises(ValueError, match="causal_conv1d_fn of its layers would carry no state from rank to rank"):
        model(**shard_batch(_plain(), ContextParallel()))


def test_layers_that_are_replaced_after_prepare_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(build(FAMILIES["lfm2"]))
    monkeypatch.setattr(type(mixers(model)[0][0]), "forward", lambda module, hidden_states, **rest: hidden_states)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM got a sharded batch and has carried no state from rank"):
        model(**shard_batch(_plain(), ContextParallel()))


@pytest.mark.parametrize(
    ("name", "lost"), [("rwkv", "rwkv_linear_attention"), ("qwen3_next", "causal_conv1d_fn"), ("minimax", "forward")]
)
def test_one_function_that_is_put_back_beside_others_is_noticed(
    name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others still carry their states from rank to rank."""
    model = prepare(build(FAMILIES[name]))
    (kind, *_) = [type(module) for module, known in mixers(model) if lost in (*known.calls, known.method)]
    owner = kind if lost == "forward" else __import__(kind.__module__, fromlist=[lost])
    monkeypatch.setattr(owner, lost, getattr(owner, lost).__wrapped__)
    with pytest.raises(ValueError, match=f"{lost} of its layers would carry no state from rank to rank"):
        model(**shard_batch(_plain(), ContextParallel()))


def test_labels_of_a_loss_with_a_mean_over_logits_are_refused() -> None:
    model = prepare(build(FAMILIES["bamba"]))
    model.z_loss_coefficient = 0.1
    local = shard_batch(_plain(), ContextParallel())
    with pytest.raises(ValueError, match=r"adds a mean .*z_loss_coefficient=0\.1\); set z_loss_coefficient to 0"):
        model(**local, labels=local["shift_labels"], use_cache=False)
    del local["shift_labels"]
    assert model(**local, use_cache=False).loss is None


@pytest.mark.skipif("xlstm" not in FAMILIES, reason="this release has no xLSTM")
def test_what_xlstm_adds_to_denominators_is_known_or_refused() -> None:
    model = build(FAMILIES["xlstm"])
    assert problems(model) == []
    model.config.eps = 0.1
    (reason,) = problems(model)
    assert "its mLSTM adds eps=0.1 to denominators, and on a ring 1e-06; set eps to that" in reason


def test_states_of_tokens_before_a_shard_are_refused() -> None:
    for name in ("qwen3_next", "bamba", "minimax", "lfm2"):
        model = prepare(build(FAMILIES[name])).eval()
        ids = _plain()["input_ids"]
        with torch.no_grad():
            cache = model(ids, use_cache=True)[CACHE]
            with pytest.raises(ValueError, match="without a cache of tokens before"):
                model(**shard_batch({"input_ids": ids}, ContextParallel()), use_cache=True, **{CACHE: cache})


def _checkpoint_layers(model: Any) -> None:
    """In a way that knows nothing of a forward in progress."""
    body = model.base_model
    for layer in body.blocks if hasattr(body, "blocks") else body.layers:
        layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)


def test_checkpoints_of_others_hand_on_the_shard_that_layers_are_given(
    truths: dict[tuple[str, str], Step],
) -> None:
    """To the layers; these may hand on to their functions nothing of it."""
    for name in ("qwen3_next", "recurrent_gemma", "zamba"):
        model = prepare(build(FAMILIES[name]))
        _checkpoint_layers(model)
        local = shard_batch(packed(DOCUMENTS, seed=1), ContextParallel())
        _, grads = step(model, sum_of_losses(model(**local, use_cache=False).logits, local["shift_labels"]))
        error, parameter = worst(grads, truths[name, "packed"][1])
        assert error <= 1e-5, (name, parameter, error)


def _wrap_layers(model: Any, impl: CheckpointImpl) -> None:
    body = model.base_model
    layers = body.blocks if hasattr(body, "blocks") else body.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, checkpoint_impl=impl)


@pytest.mark.parametrize("impl", CheckpointImpl, ids=str)
def test_layers_in_checkpoint_wrappers_find_their_shards(
    impl: CheckpointImpl, truths: dict[tuple[str, str], Step]
) -> None:
    """FSDP's, around layers that hand on to their mixers nothing of what they are given; of two batches in turn."""
    for name in [name for name in ("mamba", "rwkv", "jamba", "xlstm", "zaya", "qwen3_next") if name in FAMILIES]:
        model = prepare(build(FAMILIES[name]))
        _wrap_layers(model, impl)
        model.enable_input_require_grads()
        losses = []
        for kind in ("packed", "padded"):
            local = shard_batch(BATCHES[kind], ContextParallel())
            labels, logits = local.pop("shift_labels"), model(**local, use_cache=False).logits
            losses.append(sum_of_losses(logits, labels))
        sum(losses).backward()
        ours, others = truths[name, "packed"][1], truths[name, "padded"][1]
        grads = {each.replace("_checkpoint_wrapped_module.", ""): grad for each, grad in grads_of(model).items()}
        error, parameter = worst(grads, {each: grad + others[each] for each, grad in ours.items()})
        assert error <= 1e-5, (name, parameter, error)


def test_a_checkpoint_that_does_not_hand_on_the_shard_is_refused() -> None:
    for name in ("mamba", "rwkv", "jamba", "zaya"):
        model = prepare(build(FAMILIES[name]))
        _checkpoint_layers(model)
        logits = model(**shard_batch(_plain(), ContextParallel()), use_cache=False).logits
        with pytest.raises(ValueError, match="is computed again in the backward pass without its shard"):
            logits.sum().backward()


def test_pieces_of_a_shard_that_xlstm_would_evaluate_by_themselves_are_refused() -> None:
    config = copy.deepcopy(FAMILIES["xlstm"])
    config.max_inference_chunksize = 16
    model = prepare(build(config)).eval()
    with pytest.raises(ValueError, match="in pieces of max_inference_chunksize=16 tokens"):
        model(**shard_batch(_plain(), ContextParallel()))
