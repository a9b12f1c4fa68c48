"""What becomes of the losses of several rings: one mean over the tokens of all, or each ring's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.modeling_outputs import CausalLMOutput

import burst_plugin
import burst_plugin.deepspeed as burst
from burst_plugin.batch import IGNORED_LABEL
from burst_plugin.deepspeed.config import BLOCK, Block
from burst_plugin.huggingface.models import problems
from tests.support.deepspeed_run import (
    VOCAB,
    Batch,
    Result,
    Run,
    build,
    configuration,
    draw,
    start,
    stop,
    train_unmodified,
    worst,
)
from tests.support.families import experts
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

STAGES = range(4)
GRADS = 1e-5  # relative
RINGS = 2
RUN = Run(accumulation=2, config={"gradient_clipping": 0.0})
ROUTER = 0.5
EXPERTS = replace(RUN, model=experts(output_router_logits=True, router_aux_loss_coef=ROUTER))


def _uneven() -> list[Batch]:
    """Two micro-batches of two rows, one for each ring, whose labels are many, few, some, and few."""
    batches = draw(2)
    for batch, kept in zip(batches, (10, 9), strict=True):
        batch["labels"][1, kept:] = IGNORED_LABEL
    return batches


BATCHES = _uneven()


def _count(rows: Batch) -> int:
    return int((rows["labels"][:, 1:] != IGNORED_LABEL).sum())


def _reference(loss: str, run: Run = RUN) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by ring and micro-batch, and gradients, from the definition on one rank.

    To either mean comes the mean of what the routers of rings have, if there are any.
    """
    model = build(run)
    values: list[list[float]] = [[], []]
    for batch in BATCHES:
        rings = [{name: x[ring : ring + 1] for name, x in batch.items()} for ring in range(RINGS)]
        total = sum(map(_count, rings))
        outputs = [model(**rows, num_items_in_batch=1, use_cache=False) for rows in rings]
        routers = [ROUTER * output.aux_loss if "aux_loss" in output else 0.0 for output in outputs]
        sums = [output.loss - router for output, router in zip(outputs, routers, strict=True)]
        means = [x / _count(rows) + router for x, rows, router in zip(sums, rings, routers, strict=True)]
        both = sum(sums) / total + sum(routers) / RINGS if loss == "token_mean" else sum(means) / RINGS
        (both / RUN.accumulation).backward()
        for ring in range(RINGS):
            values[ring].append(float((both if loss == "token_mean" else means[ring]).detach()))
    return values, {name: parameter.grad for name, parameter in model.named_parameters()}


def _several(rank: int, runs: Sequence[Run], plain: bool) -> list[Result]:
    return [train_unmodified(run, BATCHES, plain=plain) for run in runs]


def _check(runs: Sequence[Run], ranks: int, loss: str, *, plain: bool = False) -> None:
    values, grads = _reference(loss, runs[0])
    found = run_ranks(_several, ranks, runs, plain, timeout_s=120.0)
    for rank, results in enumerate(found):
        for run, result in zip(runs, results, strict=True):
            about = f"{rank=} {run.stage=} {run.cp=} {run.block=}"
            assert result.losses == pytest.approx(values[rank * RINGS // ranks], rel=1e-6), about
            error, name = worst(result.grads, grads)
            assert error <= GRADS, (about, name)


def test_the_two_means_are_far_apart() -> None:
    """Of labels as uneven as these; else the tests below could not tell them."""
    counts = [[_count({"labels": batch["labels"][ring : ring + 1]}) for ring in range(RINGS)] for batch in BATCHES]
    assert all(many > 2 * few > 0 for many, few in counts)
    one, other = (_reference(loss)[1] for loss in ("token_mean", "mean_of_ranks"))
    assert worst(one, other)[0] > 0.05


@pytest.mark.parametrize(
    ("asked", "loss"),
    [({}, "token_mean"), ({"loss": "token_mean"}, "token_mean"), ({"loss": "mean_of_ranks"}, "mean_of_ranks")],
    ids=str,
)
def test_two_rings(asked: dict[str, Any], loss: str) -> None:
    _check([replace(RUN, cp=2, stage=stage, block=asked) for stage in STAGES], 4, loss)


@pytest.mark.parametrize(
    ("asked", "loss"),
    [
        ({}, "mean_of_ranks"),
        ({"loss": "auto"}, "mean_of_ranks"),
        ({"loss": "mean_of_ranks"}, "mean_of_ranks"),
        ({"loss": "token_mean"}, "token_mean"),
    ],
    ids=str,
)
def test_rings_of_one(asked: dict[str, Any], loss: str) -> None:
    _check([replace(RUN, cp=1, stage=stage, block=asked) for stage in STAGES], 2, loss)


def test_mean_of_ranks_is_what_deepspeed_gives_without_rings() -> None:
    _check([replace(RUN, stage=stage) for stage in STAGES], 2, "mean_of_ranks", plain=True)


def _without_labels(rank: int, run: Run) -> list[float]:
    """Where the second ring has no labels at all."""
    batch = {name: x.clone() for name, x in BATCHES[0].items()}
    batch["labels"][1] = IGNORED_LABEL
    return train_unmodified(replace(run, accumulation=1), [batch]).losses


def test_a_ring_without_labels_counts_as_zero() -> None:
    run = replace(RUN, cp=2, block={"loss": "mean_of_ranks"})
    first, _, third, fourth = run_ranks(_without_labels, 4, run)
    assert first[0] > 1.0
    assert third == fourth == [0.0]


# ----------------------------------------------------------------------------------- rings of one leave losses alone


def _encoder() -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(vocab_size=VOCAB, pad_token_id=0, initializer_range=0.15, **shape)
    return transformers.ModernBertForMaskedLM(config).train()


def _classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_labels=3, pad_token_id=0, initializer_range=0.15,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config).train()


KINDS = {
    "masked": (_encoder, BATCHES[0]),
    "classes": (_classifier, {"input_ids": BATCHES[0]["input_ids"], "labels": torch.tensor([2, 0])}),
}


def _other_losses(rank: int, kind: str) -> list[tuple[float, float]]:
    """Of the engine and of the model alone: the loss in training and in evaluation, and a gradient's norm."""
    make, batch = KINDS[kind]
    alone = make()
    truth = alone(**batch).loss
    truth.backward()
    (name, parameter), *_ = alone.named_parameters()
    burst.install()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(Run(cp=1, config=RUN.config), 2)
    )
    loss = engine(**batch).loss
    engine.backward(loss)
    grad = deepspeed.utils.safe_get_full_grad(dict(model.named_parameters())[name]).clone()
    evaluated = float(burst.eval_batch(batch, engine))
    engine.eval()
    engine.backward(engine(**batch).loss)  # as anybody may without the plugin
    stop(engine)
    error = float((grad - parameter.grad).norm() / parameter.grad.norm())
    expected = float(truth.detach())
    return [(float(loss.detach()), expected), (evaluated, expected), (error + 1.0, 1.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_any_loss_of_a_model_is_left_alone(kind: str) -> None:
    """Masked tokens, and classes of whole sequences, whose labels are not those of tokens."""
    for found in run_ranks(_other_losses, 2, kind):
        for got, expected in found:
            assert got == pytest.approx(expected, rel=1e-5)


def test_a_mean_over_all_tokens_is_refused_for_other_losses() -> None:
    assert problems(_encoder(), is_whole=True, is_own_mean=True) == []
    (reason,) = problems(_encoder(), is_whole=True)
    assert "its loss is that of ForMaskedLM, but labels are counted as ForCausalLM" in reason


@pytest.mark.parametrize("loss", ["token_mean", "mean_of_ranks"])
def test_losses_of_routers(loss: str) -> None:
    _check([replace(EXPERTS, cp=2, stage=stage, block={"loss": loss}) for stage in STAGES], 4, loss)


def test_losses_of_routers_on_rings_of_one() -> None:
    _check([replace(EXPERTS, cp=1, stage=stage) for stage in STAGES], 2, "mean_of_ranks")


def _router_set_late(rank: int) -> None:
    engine = start(RUN, 2)
    engine.module.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits is set, but its code has no load_balancing"):
        engine(**burst.shard_batch(BATCHES[0]))


def test_other_losses_of_routers_are_refused_whenever_they_are_switched_on() -> None:
    run_ranks(_router_set_late, 2)


# --------------------------------------------------------------------------------------------- models of one's own

IDS = draw(1, length=32)[0]["input_ids"]


def _labels(*where: slice) -> torch.Tensor:
    """Labels of two rows, of which zigzag gives tokens 0 to 7 and 24 to 31 to rank 0 of two."""
    labels = torch.full_like(IDS, IGNORED_LABEL)
    for each in where:
        labels[:, each] = IDS[:, each]
    return labels


UNEVEN, ON_RANK_0 = _labels(slice(10, 14), slice(26, 32)), _labels(slice(26, 32))
EVEN = _labels(slice(2, 6), slice(10, 14))


class _Own(torch.nn.Module):
    """A model whose tokens do not meet; `kind` says what its loss is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head, self.kind = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB), kind

    def forward(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **rest: Any) -> Any:
        if dist.is_initialized():
            x = torch.zeros(*input_ids.shape, 1, 8)
            burst_plugin.burst_attention(x, x, x, burst.context())
        logits = self.head(self.embed(input_ids))
        pair = logits.flatten(0, 1), shift_labels.flatten()
        mean = torch.nn.functional.cross_entropy(*pair)
        if self.kind == "outside":
            return CausalLMOutput(logits=logits)
        if self.kind == "scalar":
            return mean
        if self.kind == "scalar token_mean":
            return burst.token_mean_loss(logits, shift_labels)
        if self.kind == "tuple":
            return mean, logits
        if self.kind == "tuple, loss last":
            return logits, mean
        if self.kind == "mapping":
            return {"loss": mean, "logits": logits}
        if self.kind == "another key, of one element":
            return {"logits": logits, "lm_loss": mean[None]}
        loss = {
            "mean": lambda: mean,
            "token_mean": lambda: burst.token_mean_loss(logits, shift_labels),
            "smoothed": lambda: torch.nn.functional.cross_entropy(*pair, label_smoothing=0.1),
            "beside": lambda: mean + 0.1 * self.head.weight.square().mean(),
            "masked": lambda: _masked_mean(*pair),
        }[self.kind]()
        return CausalLMOutput(loss=loss, logits=logits)


_WHERE: dict[str, Any] = {
    "mapping": "loss",
    "tuple": 0,
    "tuple, loss last": 1,
    "another key, of one element": "lm_loss",
}


class _Targets(_Own):
    """The same with other names of arguments."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(idx, targets)


class _Around(torch.nn.Module):
    """A module of one's own around a model of transformers: around its body with a head, or around all of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = build(RUN), kind

    def forward(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **rest: Any) -> Any:
        if self.kind == "around the body":
            logits = self.inner.lm_head(self.inner.model(input_ids=input_ids, use_cache=False, **rest)[0])
        else:
            logits = self.inner(input_ids=input_ids, use_cache=False, **rest).logits
        return CausalLMOutput(torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), logits)


def _masked_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean whose gradient is NaN, too, where there are no labels."""
    keep = labels != IGNORED_LABEL
    losses = torch.nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return (losses * keep).sum() / keep.sum()


def _own_engine(kind: str, cp: int, block: dict[str, Any]) -> Any:
    burst.install()
    torch.manual_seed(0)
    model = _Targets("mean") if kind == "targets" else _Own(kind)
    run = Run(cp=cp, config={"gradient_clipping": 0.0}, block=block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run, 2 * cp))[0]


def _steps(rank: int, kind: str, batches: Sequence[Sequence[torch.Tensor]], block: dict[str, Any]) -> list[Any]:
    """Return the loss and the gradient of every step; `batches` has labels of every ring."""
    cp, found = dist.get_world_size() // len(batches[0]), []
    engine = _own_engine(kind, cp, block)
    for rings in batches:
        weight = engine.module.head.weight.detach().clone()
        local = burst.shard_batch({"input_ids": IDS, "labels": rings[rank // cp]})
        loss = engine(local["input_ids"], local["shift_labels"]) if kind == "targets" else engine(**local)
        if kind == "outside":
            loss = burst.token_mean_loss(loss.logits, local["shift_labels"])
        elif kind in _WHERE:
            loss = loss[_WHERE[kind]].sum()
        else:
            loss = loss.loss
        engine.backward(loss)
        engine.step()
        found.append((float(loss.detach()), weight - engine.module.head.weight.detach()))
    stop(engine)
    return found


def _several_kinds(rank: int, cases: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [_steps(rank, *case) for case in cases]


def _own_truth(batches: Sequence[Sequence[torch.Tensor]], loss: str = "token_mean") -> list[Any]:
    """The same from the definition on one rank, in float64."""
    torch.manual_seed(0)
    model, found = _Own("mean").double(), []
    for rings in batches:
        shifted = [torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) for labels in rings]
        means = [model(IDS, labels).loss for labels in shifted]
        counts = [int((labels != IGNORED_LABEL).sum()) if loss == "token_mean" else 1 for labels in shifted]
        total = sum(mean * n for mean, n in zip(means, counts, strict=True)) / sum(counts)
        model.zero_grad()
        total.backward()
        found.append((float(total.detach()), model.head.weight.grad.clone()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
    return found


def _check_own(cases: Sequence[tuple[Any, ...]], ranks: int) -> None:
    for results in run_ranks(_several_kinds, ranks, cases):
        for (kind, batches, block), steps in zip(cases, results, strict=True):
            for (loss, grad), (value, truth) in zip(steps, _own_truth(batches, **block), strict=True):
                assert float((grad - truth).norm() / truth.norm()) <= GRADS, (kind, block)
                if not block:  # whose value is that of a ring
                    assert loss == pytest.approx(value, rel=1e-5), kind


def test_a_loss_of_ones_own_becomes_that_of_the_whole_batch() -> None:
    """Means over a rank's labels. Those of models that call token_mean_loss are right already."""
    batches = [[UNEVEN], [ON_RANK_0], [UNEVEN]]
    kinds = ("mean", *_WHERE, "targets", "masked", "token_mean", "outside")
    _check_own([(kind, batches, {}) for kind in kinds], 2)


def test_a_loss_of_ones_own_after_even_labels_and_with_all_on_one_rank() -> None:
    first = ([EVEN], [EVEN], [UNEVEN]), ([ON_RANK_0], [EVEN], [UNEVEN], [ON_RANK_0])
    _check_own([("mean", batches, {}) for batches in first], 2)


def test_a_loss_of_ones_own_on_two_rings() -> None:
    batches = [[EVEN, ON_RANK_0], [UNEVEN, EVEN], [ON_RANK_0, UNEVEN]]
    cases = [("mean", batches, {}), ("mean", batches, {"loss": "mean_of_ranks"}), ("token_mean", batches, {})]
    _check_own(cases, 4)


def _told(rank: int, kind: str) -> str:
    """Return what a model is told of its loss, as a warning or an error, of even labels and then of uneven ones.

    A kind that ends in ", evenly" gets even labels alone.
    """
    kind, is_even = kind.removesuffix(", evenly"), kind.endswith(", evenly")
    engine = _own_engine(kind, 2, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            engine(**burst.shard_batch({"input_ids": IDS, "labels": EVEN}))
        if is_even:
            return "".join(str(each.message) for each in caught)
        try:
            engine(**burst.shard_batch({"input_ids": IDS, "labels": UNEVEN}))
        except ValueError as error:
            return f"ValueError: {error}"
    return "".join(str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("smoothed", "ValueError: the model's own loss is not the mean cross entropy over a rank's shift_labels"),
        ("beside", "ValueError: the model's own loss is not the mean cross entropy over a rank's shift_labels"),
        ("scalar", "the model returns a loss without the logits that it is computed from"),
        ("smoothed, evenly", "not the mean cross entropy over a rank's shift_labels, and is averaged over ranks"),
    ],
)
def test_other_losses_of_ones_own_are_not_silent(kind: str, message: str) -> None:
    for told in run_ranks(_told, 2, kind):
        assert message in told
        assert "token_mean_loss(logits, shift_labels)" in told


def test_a_model_that_calls_token_mean_loss_is_left_alone() -> None:
    assert run_ranks(_told, 2, "scalar token_mean") == ["", ""]


def _around(rank: int, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses in training, with all labels on one rank as well, and in evaluation, and the gradients of the first."""
    burst.install()
    model = _Around(kind).train()
    run = Run(cp=2, config={"gradient_clipping": 0.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run, 2))
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    for labels in (UNEVEN, ON_RANK_0):
        loss = engine(**burst.shard_batch({"input_ids": IDS, "labels": labels})).loss
        engine.backward(loss)
        losses.append(float(loss.detach()))
        grads = grads or {name: deepspeed.utils.safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
        assert burst.context(engine).rank_state.draws.step == engine.global_steps, "dropout goes by it"
        engine.step()
    losses.append(float(burst.eval_batch({"input_ids": IDS, "labels": UNEVEN}, engine)))
    stop(engine)
    return losses, grads


@pytest.mark.parametrize("kind", ["around the body", "around the model"])
def test_a_loss_of_a_module_around_a_model_becomes_that_of_the_whole_batch(kind: str) -> None:
    model, truth = _Around(kind).train(), []
    expected: dict[str, torch.Tensor] = {}
    for labels in (UNEVEN, ON_RANK_0, UNEVEN):
        model.zero_grad()
        loss = model(IDS, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)).loss
        loss.backward()
        truth.append(float(loss.detach()))
        expected = expected or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for losses, grads in run_ranks(_around, 2, kind):
        assert losses == pytest.approx(truth, rel=1e-5)
        error, name = worst(grads, expected)
        assert error <= GRADS, name


def _evaluated(rank: int) -> float:
    return float(burst.eval_batch({"input_ids": IDS, "labels": ON_RANK_0}, _own_engine("mean", 2, {})))


def test_a_rank_without_labels_counts_as_zero_in_evaluation() -> None:
    assert run_ranks(_evaluated, 2) == pytest.approx([_own_truth([[ON_RANK_0]])[0][0]] * 2, rel=1e-5)


def _changed_labels(rank: int) -> str:
    """Labels that one rank hides once its batch is cut, and those that stay as they are."""
    engine = start(replace(RUN, accumulation=1), 2)
    local = burst.shard_batch({"input_ids": IDS, "labels": UNEVEN})
    engine(**local, use_cache=False)
    if rank == 1:
        local["shift_labels"][:, 3:] = IGNORED_LABEL
    with pytest.raises(ValueError, match="change labels before") as refused:
        engine(**local, use_cache=False)
    return str(refused.value)


def test_labels_are_changed_before_a_batch_is_cut() -> None:
    told = run_ranks(_changed_labels, 2)
    assert told[0] == told[1]


_ARE_LABELS = ["targets", "entity_labels", "classes", "label_ids", "Labels"]
_NO_LABELS = ["is_target", "has_label", "target_valid", "target_input_ids", "label_positions", "label_smoothing"]


def _filled(rank: int) -> dict[str, set[float]]:
    """What fills up the entries of a batch of 5 tokens on a rank, by name; all tokens are 1, or -100."""
    ones = torch.ones(1, 5, dtype=torch.long)
    others = [*_NO_LABELS, "token_type_ids", "label_mask", "target_weights"]
    batch = {name: ones.clone() for name in ["input_ids", *_ARE_LABELS, *others]}
    batch |= {name: ones.double() for name in ("soft_targets", "age_targets", "rewards")}
    batch |= {"target_bytes": ones.to(torch.uint8), "known_labels": ones.bool()}
    batch["mtp_labels"] = ones.unsqueeze(2).repeat(1, 1, 2)
    for name in ("classes", "age_targets", "rewards"):
        batch[name][0, 1] = IGNORED_LABEL
    cp = burst_plugin.ContextParallel(dist.group.WORLD)
    local = burst_plugin.shard_batch(batch, cp, pad_token_id=7)
    cp.close()
    is_padding = local["input_ids"] == 7
    return {name: {*local[name][is_padding].flatten().tolist()} for name in batch}


def test_padding_that_fills_up_a_length_has_no_labels_under_any_name() -> None:
    for filled in run_ranks(_filled, 2):
        for name in (*_ARE_LABELS, "mtp_labels", "age_targets"):
            assert filled.pop(name) == {IGNORED_LABEL}, name
        assert filled.pop("input_ids") == {7}
        assert all(values == {0} for values in filled.values()), filled


# ------------------------------------------------------------------------------------------------------- the option


def test_what_the_block_takes() -> None:
    assert Block.of({BLOCK: {"loss": "mean_of_ranks"}}).loss_of(4) == "mean_of_ranks"
    assert Block.of({BLOCK: {"loss": "token_mean"}}).loss_of(1) == "token_mean"
    assert [Block.of({BLOCK: {}}).loss_of(size) for size in (1, 2)] == ["mean_of_ranks", "token_mean"]
    for wrong in ("mean", None, ["token_mean"], True):
        with pytest.raises(ValueError, match=r"loss=.* is not valid; use one of: token_mean, mean_of_ranks, auto"):
            Block.of({BLOCK: {"loss": wrong}})


def _unlike(rank: int) -> str:
    loss = ("token_mean", "mean_of_ranks")[rank]
    with pytest.raises(ValueError, match="all ranks must have the same") as refused:
        start(Run(cp=2, block={"loss": loss}), 2)
    return str(refused.value)


def test_ranks_that_ask_for_unlike_means_are_told() -> None:
    assert len(set(run_ranks(_unlike, 2))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_with_class_weights_is_not_taken_for_a_mean(dtype: torch.dtype) -> None:
    """At the beginning of training it is within 1 % of the mean, as all classes are nearly alike."""
    from burst_plugin.activations.loss_check import summed_loss, tolerance_of

    draw = torch.Generator().manual_seed(0)
    logits = (0.3 * torch.randn(512, 64, generator=draw)).to(dtype)
    labels, weights = torch.randint(64, (512,), generator=draw), 1 + 7 * (torch.arange(64) % 2).float()
    mean = torch.nn.functional.cross_entropy(logits.float(), labels)
    weighted = torch.nn.functional.cross_entropy(logits.float(), labels, weight=weights)
    assert 1e-3 < abs(float(weighted - mean) / float(mean)) < 1e-2
    assert abs(float(weighted - mean)) > tolerance_of(weighted, logits) * float(mean)
    assert summed_loss(logits, labels) / 512 == pytest.approx(float(mean), rel=0.1 * tolerance_of(mean, logits))
    rounded = torch.nn.functional.cross_entropy(logits.bfloat16(), labels).float()
    assert abs(float(rounded - mean)) <= tolerance_of(rounded, logits.bfloat16()) * float(mean)
