"""Models whose code is not of transformers, prepared for a loop of one's own: labels that they shift once more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import prepare
from tests.support.deepspeed_run import draw, llama
from tests.support.ranks import run_ranks

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
