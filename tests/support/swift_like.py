"""A trainer that computes its loss as the Seq2SeqTrainer of ms-swift does, by the name that the adapter looks for."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from datasets import Dataset

from tests.support.deepspeed_run import VOCAB


@dataclass
class Seq2SeqConfig(transformers.TrainingArguments):
    """Options of the trainer; samples are short enough for any `max_length`."""

    max_length: int = 0


class Seq2SeqTrainer(transformers.Trainer):
    """The loss of a batch, router loss included, weighs as much as its labels in a step."""

    __module__ = "swift.trainers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.template = SimpleNamespace(sequence_parallel_size=1, model_meta=SimpleNamespace(is_multimodal=False))
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]  # on a ring they are shifted and have another name
        outputs = model(**inputs)
        loss = outputs.loss
        if num_items_in_batch is not None:
            loss = loss * ((labels[:, 1:] != -100).sum() / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def labelled(seed: int) -> Dataset:
    """Texts of unlike lengths, whose later tokens are labels."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(16):
        length, asked = int(torch.randint(9, 30, (), generator=draw)), int(torch.randint(1, 8, (), generator=draw))
        ids = torch.randint(2, VOCAB, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * asked + ids[asked:]})
    return Dataset.from_list(rows)
