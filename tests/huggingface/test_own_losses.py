"""Models whose code is not of transformers, prepared for a loop of one's own: labels that they shift once more."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import draw, llama, worst
from tests.support.hybrids import build, hybrids
from tests.support.ranks import run_ranks

_SCALED = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
BODIES = {
    **{name: hybrids()[name] for name in ("mamba", "mamba2", "jamba")},
    "dynamic rope": llama(max_position_embeddings=8, rope_parameters=_SCALED),
}
_AS_MODEL = ("mamba", "mamba2")  # whose forward hands its body no shard
BATCH = draw(1, rows=2, length=32)[0]


class Shifting(transformers.LlamaForCausalLM):
    """Shifts labels itself, as much code of model hubs does, and takes the mean over a rank's labels."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if labels is not None:
            output["loss"] = self.mean(output.logits[:, :-1], labels[:, 1:], kwargs.get("num_items_in_batch"))
        return output

    def mean(self, logits: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


class Counting(Shifting):
    """Shifts labels itself, and divides by the number of labels of all ranks."""

    def mean(self, logits: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


class HandingOn(transformers.LlamaForCausalLM):
    """Leaves the loss to transformers."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels, **kwargs)


class Smoothing(HandingOn):
    """Has another loss, of labels as they are."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        total = cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.5, reduction="sum")
        output["loss"] = total / kwargs["num_items_in_batch"]
        return output


class ByToken(HandingOn):
    """Has a loss for each token, of which nothing is known."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output["loss"] = cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none")
        return output


def _told(rank: int) -> list[str]:
    """What each kind of model is told, in a warning or an error; "" for nothing."""
    found, cp = [], ContextParallel(dist.group.WORLD)
    for kind in (Shifting, Counting, HandingOn, Smoothing, ByToken):
        torch.manual_seed(0)
        model = prepare(kind._from_config(llama(), attn_implementation="eager").train())
        local = shard_batch(BATCH, cp)
        count = local["burst"].valid_tokens
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(**local, labels=local["shift_labels"], num_items_in_batch=count, use_cache=False)
                found.append("".join(str(each.message) for each in caught if "the loss of" in str(each.message)))
            except ValueError as error:
                found.append(str(error))
    cp.close()
    return found


@pytest.mark.huggingface
def test_labels_that_are_shifted_twice_are_refused_on_every_rank() -> None:
    for shifting, counting, handing_on, smoothing, by_token in run_ranks(_told, 2):
        assert "Shifting shifts labels by one token to compute its loss" in shifting
        assert "Counting shifts labels by one token to compute its loss" in counting
        assert not handing_on
        assert not by_token
        assert "the loss of Smoothing is not the cross entropy of its logits over labels" in smoothing


def _logits(model: Any, way: str, batch: dict[str, Any]) -> torch.Tensor:
    """Logits by a call of the model, of its body, perhaps in a checkpoint, or of its `forward`."""
    if way in ("body", "checkpoint"):
        call: Any = partial(checkpoint, use_reentrant=False) if way == "checkpoint" else lambda body: body()
        return model.get_output_embeddings()(call(partial(model.base_model, **batch, use_cache=False))[0])
    return (model.forward if way == "forward" else model)(**batch, use_cache=False).logits


def _gradients(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _past_the_model(rank: int, name: str) -> list[Any]:
    """Gradients added up over ranks, for a loss of one's own from a body, and from `forward`; or what is told."""
    found: list[Any] = []
    cp = ContextParallel(dist.group.WORLD)
    for way in ("body", "checkpoint", "forward"):
        model = prepare(build(BODIES[name])).train()
        local = shard_batch(BATCH, cp)
        labels = local.pop("shift_labels")
        try:
            found.append(_gradients(model, _logits(model, way, local), labels))
        except ValueError as error:
            found.append(str(error))
            continue
        for grad in found[-1].values():
            dist.all_reduce(grad)
    cp.close()
    return found


@pytest.mark.huggingface
@pytest.mark.parametrize("name", BODIES)
def test_calls_past_the_model_itself_are_prepared_as_its_own_or_refused(name: str) -> None:
    model = build(BODIES[name]).train()
    labels = torch.nn.functional.pad(BATCH["labels"][:, 1:], (0, 1), value=-100)
    truth = _gradients(model, _logits(model, "model", {"input_ids": BATCH["input_ids"]}), labels)
    for *bodies, forward in run_ranks(_past_the_model, 2, name):
        for body in bodies:
            error, where = worst(body, truth)
            assert error < 1e-4, where
        if name in _AS_MODEL:
            assert "to the model itself, not to its forward: model(**batch)" in forward
        else:
            error, where = worst(forward, truth)
            assert error < 1e-4, where


@pytest.mark.huggingface
def test_bodies_of_whole_batches_or_for_router_logits() -> None:
    model = prepare(build(llama())).eval()
    whole = model.base_model(input_ids=BATCH["input_ids"])[0]
    local = shard_batch(BATCH, ContextParallel())
    del local["shift_labels"]
    torch.testing.assert_close(model.base_model(**local)[0], whole)
    with pytest.raises(ValueError, match="LlamaForCausalLM was not called itself, but its forward or its LlamaModel"):
        model.base_model(**local, output_router_logits=True)
