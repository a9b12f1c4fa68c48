"""Samples of a global batch in an order that gives microbatches similar work: `--burst-even-microbatches`.

Where attention stays inside documents, the work of a sample is the sum of the squares of its documents' lengths. In
every step, samples are assigned such that data-parallel ranks have similar sums of work, and then the microbatches of
each rank. Ranks compute their largest microbatches first, so that those computed at the same time are alike. Every
step trains on the samples that Megatron's sampler has for it, in another order, and a run resumes as without the
flag.

Works 9 1 4 4 6 2 1 5 on two ranks, one sample per microbatch: in Megatron's order the ranks compute 9 4 6 1 and
1 4 2 5, in all 20 and 12, or 9 + 4 + 6 + 5 = 24 if they meet after every microbatch. Evened, they compute 9 4 2 1 and
6 5 4 1, in all 16 each, or 9 + 5 + 4 + 1 = 19.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import num_microbatches_calculator

from burst_plugin.frameworks.options import Rule, off, one_of
from burst_plugin.frameworks.wrapping import bind, wrap, wrap_everywhere
from burst_plugin.megatron.flags.arguments import PACKS, RESETS, flag_of, parsed_arguments, unsupported

_FLAG = "--burst-even-microbatches"
_MARK = "_burst_plugin_evens"  # on the function that makes loaders; on a sampler: its dataset
_RULES: Mapping[str, Rule] = {
    "dataloader_type": Rule(one_of("single"), "steps of other loaders are not known ahead; use single"),
    "sft": Rule(off, "its data say how long conversations are only when they are read"),
    "hybrid_context_parallel": Rule(off, "it spreads the samples of a global batch itself"),
    "perform_rl_step": Rule(off, "its samples do not come from a data loader"),
}
_INDEXES = ("document_index", "sample_index", "shuffle_index")
_INDEXES_OF_BLENDS = ("dataset_index", "dataset_sample_index")

Assignment = list[list[list[int]]]  # by data-parallel rank and microbatch: numbers of samples


def add_even_microbatches_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--burst-even-microbatches` to `parser`, in an argument group of its own, and return the parser.

    Raises argparse.ArgumentError if the flag was added already.
    """
    text = "assign the samples of each step so that data-parallel ranks and pipeline stages wait less for each other"
    group = parser.add_argument_group("even microbatches", "with any attention that stays inside documents")
    group.add_argument(_FLAG, action="store_true", help=text)
    return parser


def evens_microbatches() -> bool:
    """Return whether Megatron's parsed arguments have `--burst-even-microbatches`."""
    return bool(getattr(parsed_arguments(), _FLAG[2:].replace("-", "_"), False))


def hook_even_microbatches() -> None:
    """Have Megatron's sampler assign samples evenly, if its parsed arguments have `--burst-even-microbatches`.

    It wraps `build_pretraining_data_loader` and the sampler's iterator; loaders of other data than for training keep
    Megatron's order.

    Raises:
        ValueError: naming every flag that even microbatches cannot run with, and what to write instead.
    """
    if not evens_microbatches():
        return
    args = parsed_arguments()
    reasons = unsupported(_RULES, args)
    if not any(getattr(args, name, False) for name in (RESETS, PACKS)):
        reasons.append(f"it needs {' or '.join(map(flag_of, (RESETS, PACKS)))}; else all samples have the same work")
    if reasons:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise ValueError(f"{_FLAG} cannot run with these flags; change them, or drop it:{lines}")
    samplers = importlib.import_module("megatron.training.datasets.data_samplers")
    if not hasattr(samplers.build_pretraining_data_loader, _MARK):
        wrap_everywhere(samplers, "build_pretraining_data_loader", _build_loader)
        setattr(samplers.build_pretraining_data_loader, _MARK, None)
        wrap(samplers.MegatronPretrainingSampler, "__iter__", _iterate)


def _build_loader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `build_pretraining_data_loader`, and give the sampler of training data its dataset."""
    loader = original(*args, **kwargs)
    dataset = bind(original, *args, **kwargs).arguments["dataset"]
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    if loader is not None and getattr(split, "name", None) not in ("valid", "test"):
        _refuse_unknown_lengths(dataset)
        setattr(loader.batch_sampler, _MARK, dataset)
    return loader


def _refuse_unknown_lengths(dataset: Any) -> None:
    """Raise ValueError for a dataset without an index that says how long the documents of a sample are."""
    for part in getattr(dataset, "datasets", [dataset]):
        has_lengths = hasattr(getattr(part, "dataset", None), "sequence_lengths")
        if not has_lengths or not all(hasattr(part, name) for name in _INDEXES):
            raise ValueError(
                f"{_FLAG} is not supported with {type(part).__name__}, which does not say how long documents are "
                "before they are read; use a GPTDataset, or drop the flag"
            )


def _iterate(original: Callable[..., Iterator[list[int]]], sampler: Any) -> Iterator[list[int]]:
    """Run `MegatronPretrainingSampler.__iter__`, with training data assigned evenly."""
    dataset = getattr(sampler, _MARK, None)
    return original(sampler) if dataset is None else _evened_steps(original, sampler, dataset)


def _evened_steps(original: Callable[..., Iterator[list[int]]], sampler: Any, dataset: Any) -> Iterator[list[int]]:
    """Yield this rank's microbatches, step by step: with batch sizes that grow, as many as each step will take."""
    size, width = sampler.micro_batch_size, sampler.micro_batch_times_data_parallel_size
    first = sampler.data_parallel_rank * size
    for_all = copy.copy(sampler)  # one rank that gets the microbatches of all ranks, one after the other
    for_all.data_parallel_rank, for_all.micro_batch_size = 0, width
    rows, consumed = original(for_all), sampler.consumed_samples
    calculator = copy.copy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
    while True:
        calculator.update(consumed, consistency_check=False)
        step = list(islice(rows, calculator.get()))
        if not step:
            return
        samples = list(chain.from_iterable(row for row in step if len(row) == width))
        if samples:
            works = works_of(dataset, samples)
            assigned = assign_evenly(works, width // size, size)
            if consumed == sampler.consumed_samples and dist.is_initialized() and dist.get_rank() == 0:
                print_evenness(works, assigned)
            yield from ([samples[item] for item in microbatch] for microbatch in assigned[first // size])
        if len(step[-1]) < width:  # the end of the data, if it is not dropped
            yield step[-1][first : first + size]
        consumed += sum(map(len, step))


def works_of(dataset: Any, samples: Sequence[int]) -> list[int]:
    """Return the work of attention in each of `samples`: the sum of the squares of its documents' lengths in tokens.

    It is read from the dataset's indexes, without the tokens. Parts of documents count as documents.

    Args:
        dataset: a `GPTDataset` of Megatron, or a blend of several.
        samples: numbers of samples in the dataset.
    """
    if not hasattr(dataset, "datasets"):
        return [_work(dataset, sample) for sample in samples]
    _load(dataset, _INDEXES_OF_BLENDS)
    return [_work(dataset.datasets[dataset.dataset_index[i]], dataset.dataset_sample_index[i]) for i in samples]


def _work(dataset: Any, sample: int) -> int:
    _load(dataset, _INDEXES)
    row = int(dataset.shuffle_index[sample])
    (first, start), (last, stop) = dataset.sample_index[row : row + 2].tolist()
    lengths = dataset.dataset.sequence_lengths[dataset.document_index[first : last + 1]].astype(np.int64)
    lengths[-1] = stop
    lengths[0] -= start
    return int(lengths @ lengths)


def _load(dataset: Any, names: Sequence[str]) -> None:
    """Map indexes into memory that --dataloader-defer-npy-index-mmap has left for later."""
    for name in names:
        if getattr(dataset, name) is None:
            setattr(dataset, name, np.load(getattr(dataset, f"path_to_{name}"), mmap_mode="r"))


def assign_evenly(works: Sequence[int], ranks: int, size: int) -> Assignment:
    """Return the samples of each data-parallel rank's microbatches in one step, the largest microbatches first.

    Args:
        works: the work of each sample of the step; `ranks * size` divides their number.
        ranks: data-parallel ranks, which get equally many microbatches.
        size: samples per microbatch.

    Returns:
        By rank and microbatch a list of `size` places in `works`.
    """
    assigned = []
    for samples in _assign(works, ranks):
        parts = _assign([works[sample] for sample in samples], len(samples) // size)
        microbatches = [[samples[number] for number in part] for part in parts]
        assigned.append(sorted(microbatches, key=lambda microbatch: -sum(works[sample] for sample in microbatch)))
    return assigned


def _assign(works: Sequence[int], bins: int) -> list[list[int]]:
    """Assign items to bins, the largest first, each to the bin with the least work that has room; in that order."""
    assigned: list[list[int]] = [[] for _ in range(bins)]
    waiting = [(0, number) for number in range(bins)]
    for item in sorted(range(len(works)), key=lambda item: -works[item]):
        work, emptiest = heapq.heappop(waiting)
        assigned[emptiest].append(item)
        if len(assigned[emptiest]) < len(works) // bins:
            heapq.heappush(waiting, (work + works[item], emptiest))
    return assigned


def print_evenness(works: Sequence[int], assigned: Assignment) -> None:
    """Print how even a step is over data-parallel ranks, and how even it would be in Megatron's order."""
    ranks, size, mean = len(assigned), len(assigned[0][0]), sum(works) / len(assigned)
    fullest = max(sum(works[sample] for sample in chain(*rank)) for rank in assigned)
    baseline = max(sum(work for i, work in enumerate(works) if i // size % ranks == rank) for rank in range(ranks))
    print(
        f"burst_plugin: microbatches are evened: in the first step, the fullest of {ranks} data-parallel ranks has "
        f"{fullest / mean:.2f} times the mean attention, {baseline / mean:.2f} times in Megatron's order",
        flush=True,
    )
