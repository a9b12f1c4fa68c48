"""Models that take images, on rings: losses and gradients are those of one rank without the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from burst_plugin import ContextParallel
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import worst
from tests.support.media import FAMILIES, Image, batch, of_document, tiny_model
from tests.support.ranks import run_ranks

NEWER = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(not NEWER, reason="other releases have other default configurations"),
]
VIDEOS = ("qwen2_5_vl", "qwen3_vl")
# Of unlike sizes, several in a row, one behind the other, across ranks; a row without any.
IMAGES = (Image(0, 3, (4, 4)), Image(0, 8, (2, 4)), Image(0, 20, (4, 8)), Image(1, 28, (8, 4)))
CASES: dict[str, dict[str, Any]] = {
    "images": {"images": IMAGES, "rows": 3},
    "one": {"images": (Image(0, 25, (8, 4)),)},  # fewer than ranks
    "padded": {"images": IMAGES[2:], "rows": 2, "padding": (0, 9)},
    "packed": {"images": (Image(0, 3, (4, 4)), Image(0, 22, (2, 4)), Image(0, 30, (4, 8)), Image(0, 50, (4, 4)))},
    "padded, with positions": {"images": IMAGES[2:], "rows": 2, "padding": (0, 9)},
    "video": {"images": (Image(0, 4, (4, 4), frames=2), Image(0, 30, (4, 4)), Image(0, 40, (2, 4), frames=3))},
}


DOCUMENTS = (13, 1, 31, 19)


def _batch(family: str, case: str) -> dict[str, Any]:
    options = dict(CASES[case])
    padding = options.pop("padding", ())
    found = batch(family, **options)
    if padding:
        real = torch.arange(found["input_ids"].shape[1]) >= torch.tensor(padding)[:, None]
        found |= {"attention_mask": real.long(), "labels": found["labels"].masked_fill(~real, IGNORED_LABEL)}
        found["labels"][:, max(padding)] = IGNORED_LABEL
        if "positions" in case:
            found["position_ids"] = (real.cumsum(1) - 1).clamp(0)
    if case == "packed":
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
        found |= {"position_ids": positions, "labels": found["labels"].masked_fill(positions == 0, IGNORED_LABEL)}
    return found


def _loss_and_grads(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), grads


@cache
def _on_one_rank(family: str, case: str, frozen: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    model, whole = _model(family, frozen), _batch(family, case)
    count = int((whole["labels"][:, 1:] != IGNORED_LABEL).sum())
    parts = [{name: x for name, x in whole.items() if name != "position_ids"}]
    if case == "packed":
        bounds = [*torch.tensor((0, *DOCUMENTS)).cumsum(0).tolist()]
        whole.pop("position_ids")
        parts = [of_document(whole, begin, end) for begin, end in pairwise(bounds) if end - begin > 1]
    losses = torch.stack([model(**part, num_items_in_batch=count, use_cache=False).loss for part in parts])
    return _loss_and_grads(model, losses.sum())


def _model(family: str, frozen: bool) -> Any:
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and "language_model" not in name and "lm_head" not in name))
    return model


def _on_ring(rank: int, cases: Sequence[tuple[str, str, bool]], options: dict[str, Any]) -> list[Any]:
    cp, found = ContextParallel(dist.group.WORLD, ranks_per_node=2, **options), []
    for family, case, frozen in cases:
        model = prepare(_model(family, frozen))
        if case == "padded":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        local = shard_batch(_batch(family, case), cp)
        count = local["burst"].valid_tokens
        loss, grads = _loss_and_grads(
            model, model(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False).loss
        )
        flat = torch.cat([torch.tensor([loss]), *(grad.flatten() for grad in grads.values())])
        dist.all_reduce(flat)
        parts = flat[1:].split([grad.numel() for grad in grads.values()]) if rank == 0 else ()
        found.append((float(flat[0]), {n: x.view_as(grads[n]) for n, x in zip(grads, parts, strict=False)}))
        assert cp.traffic() == cp.expected_traffic()
    return found


def _check(ranks: int, cases: Sequence[tuple[str, str, bool]], options: dict[str, Any]) -> None:
    for (loss, grads), case in zip(run_ranks(_on_ring, ranks, cases, options)[0], cases, strict=True):
        expected, truths = _on_one_rank(*case)
        assert loss == pytest.approx(expected, rel=1e-5), case
        least = 1e-5 * max(float(x.norm()) for x in truths.values())  # less is rounding, as of biases of keys
        some = {name: x for name, x in truths.items() if float(x.norm()) > least}
        assert worst({name: grads[name] for name in some}, some)[0] < 1e-5, case
        assert all(float(grads[name].norm()) < 2 * least for name in truths.keys() - some.keys()), case


@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (4, "zigzag"), (4, "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_themselves_on_one_rank(family: str, ranks: int, layout: str) -> None:
    cases = [(family, case, False) for case in CASES if case != "video" or family in VIDEOS]
    _check(ranks, [*cases, (family, "images", True)], {"layout": layout})


def _misfit(rank: int, family: str) -> str:
    cp, model, whole = ContextParallel(dist.group.WORLD), prepare(tiny_model(family)), _batch(family, "one")
    whole["input_ids"][0, 2] = 100
    local = shard_batch(whole, cp)
    with pytest.raises(ValueError, match="tokens of images") as caught:
        model(**local, use_cache=False)
    return str(caught.value)


def test_features_that_do_not_match_their_tokens_are_refused_on_every_rank() -> None:
    assert set(run_ranks(_misfit, 2, "llava")) == {
        "the batch has 5 tokens of images, but LlavaModel makes 4 features of the images; give what its processor "
        "returns for these texts"
    }


def test_positions_of_packed_documents_begin_anew() -> None:
    """Rotary embeddings see differences of positions only, but in float32 those of large ones lose their digits."""
    model, whole = prepare(tiny_model("qwen3_vl")), _batch("qwen3_vl", "packed")
    seen: list[torch.Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model(**shard_batch(whole, ContextParallel()), use_cache=False)
    assert (seen[0][:, 0][:, [0, 13, 14, 45]] == 0).all()
    assert seen[0].max() < max(DOCUMENTS)
