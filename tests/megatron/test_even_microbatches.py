"""Microbatches of like work: real datasets of packed documents, and a sampler like that of Megatron's scripts."""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from burst_plugin.megatron.adapter import add_flags, make_ring
from burst_plugin.megatron.batches import even_microbatches
from burst_plugin.megatron.batches.even_microbatches import assign_evenly, hook_even_microbatches, works_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

SEQ, GLOBAL_BATCH, EOD = 256, 32, 0
USUAL = {"burst_even_microbatches": True, "reset_attention_mask": True, "dataloader_type": "single"}


class Words:
    """A tokenizer, as far as datasets want one."""

    eod, pad, vocab_size = EOD, 999, 1000
    unique_identifiers = "words"


def _write(path: Path, seed: int, mean: int) -> str:
    """Write documents of log-normal lengths, and of words as frequent as in a text, each with its end."""
    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for length in np.ceil(random.lognormal(np.log(mean) - 0.5, 1, 1500)).astype(int):
        words = np.minimum(random.zipf(1.2, length), 900)
        builder.add_document(np.array([*words, EOD]), [length + 1])
    builder.finalize(f"{path}.idx")
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("documents")
    return [_write(directory / "short", 0, 24), _write(directory / "long", 1, 60)]


def _datasets(blend: Any, samples: int = 320) -> list[Any]:
    """Training, validation and test data as a training script builds them."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ,
        blend=blend,
        split="80,10,10",
        tokenizer=Words(),
        reset_position_ids=False,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return list(BlendedMegatronDatasetBuilder(GPTDataset, [samples, 8, 8], lambda: True, config).build())


@pytest.fixture(scope="module", params=["one", "blend"])
def datasets(request: pytest.FixtureRequest, paths: list[str]) -> list[Any]:
    return _datasets(([paths[0]], None) if request.param == "one" else (paths, [0.3, 0.7]))


# A sampler with the attributes, and the order, of that of Megatron's scripts; these are tried in tests/megatron_lm.


class Sampler:
    def __init__(self, total: int, consumed: int, size: int, rank: int, ranks: int) -> None:
        self.total_samples, self.consumed_samples = total, consumed
        self.micro_batch_size, self.data_parallel_rank = size, rank
        self.micro_batch_times_data_parallel_size = size * ranks
        self.drop_last = True

    def __iter__(self) -> Iterator[list[int]]:
        width, first = self.micro_batch_times_data_parallel_size, self.data_parallel_rank * self.micro_batch_size
        for start in range(self.consumed_samples, self.total_samples, width):
            row = list(range(start, min(start + width, self.total_samples)))
            if len(row) == width or not self.drop_last:
                yield row[first : first + self.micro_batch_size]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of Megatron's scripts that the flag is about, with parsed arguments."""
    module = types.ModuleType("data_samplers")

    class MegatronPretrainingSampler(Sampler):
        __iter__ = Sampler.__iter__

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        sampler = MegatronPretrainingSampler(len(dataset), consumed_samples, **vars(module.at))
        return types.SimpleNamespace(batch_sampler=sampler)

    vars(module).update(MegatronPretrainingSampler=MegatronPretrainingSampler, original=build_pretraining_data_loader)
    vars(module).update(build_pretraining_data_loader=build_pretraining_data_loader)
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.data_samplers", module)
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    _parse(monkeypatch)
    return module


def _parse(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    args = {**USUAL, "cp_comm_type": ["p2p"], "context_parallel_size": 1, **changes}
    at: Any = argparse.Namespace(_GLOBAL_ARGS=argparse.Namespace(**args))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", at)


def _calculator(rampup: tuple[int, int, int] | None, size: int, ranks: int) -> Any:
    """Return Megatron's number of microbatches: constant, or from a first batch by an increment over some samples."""
    sizes = {"micro_batch_size": size, "data_parallel_size": ranks}
    build = num_microbatches_calculator._build_num_microbatches_calculator
    if "rampup_batch_size" in inspect.signature(build).parameters:
        return build(1, rampup, GLOBAL_BATCH, decrease_batch_size_if_needed=False, **sizes)
    schedule = None
    if rampup is not None:  # since core 0.19 by a schedule of steps
        first, increment, samples = rampup
        batches = range(first, GLOBAL_BATCH + 1, increment)
        each = samples // (len(batches) - 1)
        schedule = " ".join(f"{number * each}:{batch}" for number, batch in enumerate(batches))
    return build(1, GLOBAL_BATCH, decrease_batch_size_if_needed=False, step_batch_size_schedule=schedule, **sizes)


def _steps(
    scripts: Any, dataset: Any, ranks: int, size: int, consumed: int = 0, rampup: Any = None
) -> list[list[list[list[int]]]]:
    """By step, rank and microbatch: the numbers of samples."""
    hook_even_microbatches()
    calculator = _calculator(rampup, size, ranks)
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator
    iterators = []
    for rank in range(ranks):
        scripts.at = types.SimpleNamespace(size=size, rank=rank, ranks=ranks)
        iterators.append(iter(scripts.build_pretraining_data_loader(dataset, consumed).batch_sampler))
    steps: list[Any] = []
    while not steps or steps[-1][0]:
        calculator.update(consumed, False)
        steps.append([list(itertools.islice(each, calculator.get())) for each in iterators])
        consumed += len(_flat(steps[-1]))
    return steps[:-1]


def _flat(step: Any) -> list[int]:
    return sorted(sample for rank in step for microbatch in rank for sample in microbatch)


# -------------------------------------------------------------------------------------------------------- the samples


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (2, 1), (4, 2), (8, 4)])
def test_every_step_trains_on_megatrons_samples(scripts: Any, datasets: list[Any], ranks: int, size: int) -> None:
    steps = _steps(scripts, datasets[0], ranks, size)
    whole = len(datasets[0]) // (ranks * size) * ranks * size
    starts = range(0, whole, GLOBAL_BATCH)
    assert [_flat(step) for step in steps] == [[*range(i, min(i + GLOBAL_BATCH, whole))] for i in starts]
    for step in steps:
        assert {len(microbatch) for rank in step for microbatch in rank} == {size}
        assert len({len(rank) for rank in step}) == 1


def test_a_run_resumes_exactly(scripts: Any, datasets: list[Any]) -> None:
    steps = _steps(scripts, datasets[0], 2, 2)
    assert _steps(scripts, datasets[0], 2, 2, 3 * GLOBAL_BATCH) == steps[3:]
    resumed = _steps(scripts, datasets[0], 4, 1, 3 * GLOBAL_BATCH)
    assert [_flat(step) for step in resumed[:-1]] == [_flat(step) for step in steps[3:-1]]


def test_batches_that_grow_keep_their_samples(scripts: Any, datasets: list[Any]) -> None:
    steps = _steps(scripts, datasets[0], 2, 2, rampup=(8, 8, 72))
    assert [len(_flat(step)) for step in steps][:6] == [8, 8, 8, 16, 16, 24]
    assert [sample for step in steps for sample in _flat(step)] == list(range(len(datasets[0]) // 4 * 4))
    for step in steps:
        samples = _flat(step)
        assigned = assign_evenly(works_of(datasets[0], samples), 2, 2)
        assert step == [[[samples[number] for number in part] for part in rank] for rank in assigned]
    assert _steps(scripts, datasets[0], 2, 2, 40, rampup=(8, 8, 72)) == steps[4:]


def test_the_last_samples_are_dropped_only_as_megatron_does(scripts: Any, paths: list[str]) -> None:
    dataset = _datasets(([paths[0]], None))[0]
    _steps(scripts, dataset, 2, 2)
    ends = []
    for drop_last in (True, False):
        sampler = scripts.build_pretraining_data_loader(dataset, 0).batch_sampler
        sampler.drop_last, sampler.total_samples = drop_last, GLOBAL_BATCH + 7
        ends.append([sample for microbatch in sampler for sample in microbatch])
    assert len(ends[0]) == GLOBAL_BATCH // 2 + 2
    assert ends[1] == [*ends[0], GLOBAL_BATCH + 6]


def _as_a_rank(rank: int, scripts: Any, dataset: Any) -> Any:
    return _steps(scripts, dataset, 4, 2)


def test_ranks_agree(scripts: Any, datasets: list[Any]) -> None:
    """Also those of one data-parallel rank: each computes it from the indexes."""
    first, *others = run_ranks(_as_a_rank, 4, scripts, datasets[0])
    assert all(other == first for other in others)


def test_validation_and_runs_without_the_flag_are_left_alone(
    scripts: Any, datasets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _steps(scripts, datasets[0], 2, 2)
    scripts.at.rank = 0
    for dataset in datasets[1:]:
        assert list(scripts.build_pretraining_data_loader(dataset, 0).batch_sampler)[:2] == [[0, 1], [4, 5]]
    vars(scripts)["build_pretraining_data_loader"] = scripts.original
    _parse(monkeypatch, burst_even_microbatches=False)
    hook_even_microbatches()
    assert scripts.build_pretraining_data_loader is scripts.original


# ----------------------------------------------------------------------------------------------------------- the work


def _read(dataset: Any, sample: int) -> int:
    """The work of a sample by its tokens: attention of a token reaches back to the end of a document."""
    ends = [number + 1 for number, token in enumerate(dataset[sample]["tokens"].tolist()) if token == EOD]
    cuts = sorted({0, *ends, SEQ})
    return sum((stop - start) ** 2 for start, stop in itertools.pairwise(cuts))


def test_works_are_those_of_the_tokens(datasets: list[Any]) -> None:
    dataset = datasets[0]
    assert works_of(dataset, range(len(dataset))) == [_read(dataset, sample) for sample in range(len(dataset))]


def test_indexes_that_are_loaded_later_are_loaded(datasets: list[Any], tmp_path: Path) -> None:
    dataset = copy.copy(datasets[0])
    expected = works_of(dataset, range(50))
    parts = [copy.copy(part) for part in getattr(dataset, "datasets", [])]
    if parts:
        dataset.datasets = parts
    for number, part in enumerate([dataset, *parts]):
        for name in [name for name in vars(part) if name.endswith("_index")]:
            np.save(tmp_path / f"{number}{name}.npy", getattr(part, name))
            setattr(part, name, None)
            setattr(part, f"path_to_{name}", str(tmp_path / f"{number}{name}.npy"))
    assert works_of(dataset, range(50)) == expected


def _excess(works: Any, step: Any) -> tuple[float, float]:
    """By how much of the mean rank the fullest rank exceeds it, and so do the fullest microbatches, summed."""
    sums = np.array([[sum(works[sample] for sample in microbatch) for microbatch in rank] for rank in step])
    mean = sums.sum() / len(sums)
    return sums.sum(1).max() / mean - 1, sums.max(0).sum() / mean - 1


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_wait_less(scripts: Any, datasets: list[Any], size: int) -> None:
    works = works_of(datasets[0], range(len(datasets[0])))
    steps = _steps(scripts, datasets[0], 4, size)[:-1]
    own = [
        [[list(range(i, i + size)) for i in range(start + rank * size, start + GLOBAL_BATCH, 4 * size)]
         for rank in range(4)]
        for start in range(0, len(steps) * GLOBAL_BATCH, GLOBAL_BATCH)
    ]  # fmt: skip
    assigned, before = (np.mean([_excess(works, step) for step in order], axis=0) for order in (steps, own))
    assert (before > (0.2, 0.5)).all(), "there is something to even out"
    assert (assigned < before * (0.3, 0.45)).all()


def test_the_example() -> None:
    works = [9, 1, 4, 4, 6, 2, 1, 5]
    assert [[works[i] for (i,) in rank] for rank in assign_evenly(works, 2, 1)] == [[9, 4, 2, 1], [6, 5, 4, 1]]
    pairs = assign_evenly(works, 2, 2)
    assert [[sum(works[sample] for sample in pair) for pair in rank] for rank in pairs] == [[10, 6], [9, 7]]


def test_how_even_a_step_is_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    works = [9, 1, 4, 4, 6, 2, 1, 5]
    for size, own in ((1, "1.25"), (2, "1.12")):
        even_microbatches.print_evenness(works, assign_evenly(works, 2, size))
        said = f"the fullest of 2 data-parallel ranks has 1.00 times the mean attention, {own} times in Megatron's"
        assert said in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reset_attention_mask": False}, "it needs --reset-attention-mask or --dataloader-inter-document-masking;"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic is not supported: .*; use single"),
        ({"sft": True}, "--sft is not supported: "),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel is not supported: "),
        ({"perform_rl_step": True}, "--perform-rl-step is not supported: "),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_groups_are_made(
    scripts: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    _parse(monkeypatch, **changes)
    with pytest.raises(SystemExit):
        make_ring(None, lambda: pytest.fail("groups are made"))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert re.search(rf"--burst-even-microbatches cannot run with these flags;.*:\n  {message}", said), said
    assert scripts.build_pretraining_data_loader is scripts.original


def test_inter_document_masking_will_do(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _parse(monkeypatch, reset_attention_mask=False, dataloader_inter_document_masking=True)
    hook_even_microbatches()
    assert scripts.build_pretraining_data_loader is not scripts.original


def test_data_of_unknown_lengths_are_refused(scripts: Any) -> None:
    class Conversations(list[int]):
        split = types.SimpleNamespace(name="train")

    scripts.at = types.SimpleNamespace(size=1, rank=0, ranks=1)
    hook_even_microbatches()
    with pytest.raises(ValueError, match="is not supported with Conversations, which does not say how long"):
        scripts.build_pretraining_data_loader(Conversations([1, 2, 3]), 0)


def test_megatrons_parser_knows_the_flag() -> None:
    parser = add_flags(lambda parser: parser, argparse.ArgumentParser())
    assert parser.parse_args(["--burst-even-microbatches"]).burst_even_microbatches
    assert not parser.parse_args([]).burst_even_microbatches
