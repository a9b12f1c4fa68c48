"""The helpers, checkpoints, zero.Init, models of one's own, groups and nodes of the framework, the launcher."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DeepSpeedPlugin
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

import burst_plugin
import burst_plugin.deepspeed as burst
import burst_plugin.huggingface
from burst_plugin.batch import SHARD_KEY
from burst_plugin.deepspeed.groups import Unit
from tests.support.deepspeed_run import (
    Run,
    build,
    configuration,
    draw,
    llama,
    reference,
    start,
    stop,
    worst,
)
from tests.support.families import families
from tests.support.launched import free_port, launched
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

ROOT = Path(__file__).parents[2]
BATCHES = draw(2)
NO_CLIPPING = {"gradient_clipping": 0.0}


# --------------------------------------------------------------------------------------------------- DeepSpeed's loop


def _plain_loop(rank: int, run: Run, compiled: bool = False) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Whole batches in, losses out, as without the plugin; then one evaluation."""
    engine = start(run, 2)
    if compiled:
        engine.compile(backend="eager")
    before = _weights(engine)
    losses = []
    for batch in BATCHES:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    after = _weights(engine)
    frozen = engine.module.get_output_embeddings().eval()
    evaluated = float(burst.eval_batch(BATCHES[0], engine))
    assert engine.training
    assert not frozen.training
    return losses, {name: after[name] - before[name] for name in after}, evaluated


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in engine.module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "compiled"), [(1, False), (4, False), (2, True)])
def test_an_unmodified_loop_on_whole_batches(cp: int, compiled: bool) -> None:
    run = Run(cp=cp, stage=1, steps=2, config=NO_CLIPPING)
    truth = reference(run, BATCHES)
    model = build(run)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x += truth.changes[name]
        expected = float(model(**BATCHES[0]).loss)
    timeout_s = 120.0 if compiled else 60.0  # compiling takes most of it
    for losses, changes, evaluated in run_ranks(_plain_loop, cp, run, compiled, timeout_s=timeout_s):
        assert losses == pytest.approx(truth.losses, rel=1e-6)
        assert worst(changes, truth.changes)[0] <= 2e-5
        assert evaluated == pytest.approx(expected, rel=1e-5)


def _prepared(model: Any) -> None:
    """As if for a loop without DeepSpeed, before there is an engine that cuts batches."""
    burst_plugin.huggingface.prepare(model)


@pytest.mark.parametrize("cp", [1, 2])
def test_layers_that_hand_on_the_mask_alone(cp: int) -> None:
    """With recomputation. The batch is cut in the forward, whichever hooks the model had before."""
    run = Run(model=families()["nemotron"], cp=cp, stage=1, steps=2, config=NO_CLIPPING)
    truth = reference(run, BATCHES)
    run = replace(run, checkpointing=True, prepare=_prepared)
    for losses, changes, _ in run_ranks(_plain_loop, cp, run):
        assert losses == pytest.approx(truth.losses, rel=1e-6)
        assert worst(changes, truth.changes)[0] <= 2e-5


class _Stateful(list[Any]):
    def state_dict(self) -> dict[str, int]:
        return {"batches": len(self)}


def _helpers(rank: int) -> tuple[torch.Tensor, list[int], int]:
    engine = start(Run(cp=2), 2)
    batches = [{**batch, "note": "kept"} for batch in BATCHES]
    loader = burst.sharded_loader(batches, engine)
    seen = list(loader)
    assert len(loader) == len(seen) == 2
    assert [batch["note"] for batch in loader.skip_first(1)] == ["kept"]
    local = seen[0]
    positions = local["position_ids"][0].tolist()
    with torch.no_grad():
        logits = engine(input_ids=local["input_ids"], position_ids=positions_of(local), burst=local["burst"]).logits
    own = [{"input_ids": batch["input_ids"] + rank} for batch in BATCHES]  # other samples on every rank
    turns = [batch["input_ids"] for batch in burst.sharded_loader(own, engine, exchange=True)]
    assert len(turns) == 4
    cp = burst.context(engine)
    assert all(torch.equal(cp.unshard(x), BATCHES[i // 2]["input_ids"] + i % 2) for i, x in enumerate(turns))
    inner = _Stateful(own)
    for number, _ in enumerate(burst.sharded_loader(inner, engine, exchange=True)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert inner.state_dict() == {"batches": 2}
        assert ["1 rank(s) of the ring have not had their turn" in str(each.message) for each in said] == (
            [] if number % 2 else [True]
        )
    return burst.gather_logits(logits, local["burst"], engine), positions, local["burst"].valid_tokens


class _Noted(list[Any]):
    """Samples that note which of them are read."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples)
        self.reads: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(index)
        return super().__getitem__(index)


def _skipped(rank: int) -> tuple[int, list[int], int]:
    """Batches left of an epoch of 8 after 5, and the samples read and batches exchanged for them."""
    engine = start(Run(cp=2), 2)
    samples = _Noted([{"input_ids": torch.full((2, 8), 10 * rank + number)} for number in range(4)])
    drawn = DataLoader(samples, batch_size=1, collate_fn=lambda batch: batch[0])
    of_torch = burst.sharded_loader(drawn, engine, exchange=True)
    every = [batch["input_ids"] for batch in of_torch]
    samples.reads.clear()
    rest = accelerate.skip_first_batches(of_torch, 5)
    with mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object) as exchange:
        left = [batch["input_ids"] for batch in rest]
    listed = burst.sharded_loader(list(samples), engine, exchange=True).skip_first(3).skip_first(2)
    for batches in (left, [batch["input_ids"] for batch in listed]):
        assert len(rest) == len(listed) == len(batches)
        assert all(torch.equal(x, every[5 + number]) for number, x in enumerate(batches))
    return len(left), samples.reads, exchange.call_count


def test_batches_that_a_resumed_run_skips_are_neither_read_nor_exchanged() -> None:
    """It stopped in the turn of rank 1 with the third batches."""
    assert run_ranks(_skipped, 2) == [(3, [2, 3], 3)] * 2  # an exchange for each batch drawn, and for the end


def _uneven_loaders(rank: int, exchange: bool) -> list[str]:
    engine = start(Run(cp=2), 2)
    loader, said = burst.sharded_loader(BATCHES[: 2 - rank], engine, exchange=exchange), []
    try:
        for number, _ in enumerate(loader):
            said.append(str(number))
    except ValueError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("exchange", "batches", "message"),
    [
        (True, 2, "the data loader has ended on ranks [1] of the 2 of a context-parallel group"),
        (False, 1, "rank 1: batch=none, since the data loader has ended"),
    ],
)
def test_a_loader_that_ends_on_one_rank_is_one_error_on_every_rank(
    exchange: bool, batches: int, message: str
) -> None:
    for *numbers, said in run_ranks(_uneven_loaders, 2, exchange):
        assert len(numbers) == batches
        assert message in said


def _where_ranks_meet(rank: int) -> list[str]:
    order: list[str] = []
    set_device, all_gather_object = type(get_accelerator()).set_device, dist.all_gather_object

    def note(name: str, original: Any) -> Any:
        return lambda *args, **kwargs: (order.append(name), original(*args, **kwargs))[1]

    with (
        mock.patch.object(type(get_accelerator()), "set_device", note("set_device", set_device)),
        mock.patch.object(dist, "all_gather_object", note("all_gather_object", all_gather_object)),
    ):
        start(Run(cp=2), 2)
    return order


def test_every_rank_takes_its_own_device_before_ranks_meet_on_it() -> None:
    """A script that sets none leaves that to the engine, which comes later."""
    for order in run_ranks(_where_ranks_meet, 2):
        assert order[:2] == ["set_device", "all_gather_object"]


def positions_of(local: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = local["position_ids"]
    return found


def test_helpers() -> None:
    with torch.no_grad():
        truth = build(Run()).eval()(BATCHES[0]["input_ids"]).logits
    zigzag = [[*range(8), *range(24, 32)], [*range(8, 24)]]
    for (logits, positions, valid), expected in zip(run_ranks(_helpers, 2), zigzag, strict=True):
        torch.testing.assert_close(logits, truth, rtol=2e-5, atol=2e-5)
        assert positions == expected
        assert valid == int((BATCHES[0]["labels"][:, 1:] != -100).sum())


def _counted(rank: int) -> tuple[list[float], list[bool]]:
    """The loss of a whole batch, with its number of tokens given and without; and the modes around an evaluation."""
    engine = start(Run(cp=2), 2)
    count = int((BATCHES[0]["labels"][:, 1:] != -100).sum())
    batches = [BATCHES[0], {**BATCHES[0], "num_items_in_batch": count}]
    losses = [float(engine(**batch).loss) for batch in batches]
    losses += [float(burst.eval_batch(batch, engine)) for batch in batches]
    modes = []
    for mode in (True, False):
        engine.train(mode)
        burst.eval_batch(BATCHES[0], engine)
        modes.append(engine.module.training)
    return losses, modes


def test_a_number_of_tokens_that_is_given_is_that_of_whole_batches() -> None:
    for losses, modes in run_ranks(_counted, 2):
        assert losses == [pytest.approx(losses[0], rel=1e-6)] * 4
        assert modes == [True, False]


def _second_engine(rank: int) -> list[float]:
    """Losses of the same model in one engine, evaluated there, and then in another, with a ring that is new."""
    run = Run(cp=2)
    first = start(run, 2)
    losses = [float(burst.eval_batch(BATCHES[0], first))]
    optimizer = torch.optim.SGD(first.module.parameters(), lr=0.1)
    second, *_ = deepspeed.initialize(model=first.module, optimizer=optimizer, config=configuration(run, 2))
    losses.append(float(second(**BATCHES[0]).loss))
    first.destroy()
    return [*losses, float(burst.eval_batch(BATCHES[0], second))]


def test_a_model_goes_from_one_engine_to_another() -> None:
    for losses in run_ranks(_second_engine, 2):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def _engine_of_a_copy(rank: int) -> list[float]:
    """Losses in training of a model in its engine, and of a deep copy of it in one of its own."""
    run = Run(cp=2)
    first = start(run, 2)
    losses = [float(first(**BATCHES[0]).loss)]
    model = copy.deepcopy(first.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run, 2))
    losses.append(float(second(**BATCHES[0]).loss))
    first.destroy()
    return [*losses, float(second(**BATCHES[0]).loss)]


def test_a_deep_copy_of_a_model_trains_in_an_engine_of_its_own() -> None:
    """It has the hooks that cut batches for the model that it was made of."""
    for losses in run_ranks(_engine_of_a_copy, 2):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def _accelerate(rank: int, run: Run) -> tuple[dict[str, torch.Tensor], int]:
    """Accelerate's loop, without Trainer; how parameters changed, and in how many steps."""
    burst.install()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {**configuration(run, 2), "burst_attention": {"enabled": True, "backward": "auto"}}
    accelerator = Accelerator(
        gradient_accumulation_steps=run.accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
    )
    model = build(run)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
    rows = [{name: x[i] for name, x in batch.items()} for batch in BATCHES for i in range(2)]
    engine, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2))
    start(Run(cp=1, config=NO_CLIPPING), 1)  # a teacher, say
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return {name: x.detach() - before[name] for name, x in model.named_parameters()}, engine.global_steps


def test_accelerates_loop() -> None:
    run = Run(cp=2, stage=1, steps=2, config=NO_CLIPPING)
    truth = reference(run, BATCHES)
    for changes, steps in run_ranks(_accelerate, 2, run):
        assert worst(changes, truth.changes)[0] <= 2e-5
        assert steps == 2


def test_the_turns_of_accelerates_last_batch_accumulate() -> None:
    """One batch per rank, two turns: one step on both, and not one for each."""
    run = Run(cp=2, stage=1, accumulation=4, config=NO_CLIPPING)
    for _, steps in run_ranks(_accelerate, 2, run):
        assert steps == 1


def _weighted_as_for_ulysses(rank: int, even: bool) -> str:
    """The loop that Accelerate's documentation has for Ulysses, which adds up the losses of ranks by their labels."""
    engine = start(Run(cp=2, config=NO_CLIPPING), 2)
    batch = BATCHES[0]
    if even:  # rank 0 has the last token, which has no next one; rank 1 has token 8
        batch = {**batch, "labels": batch["input_ids"].masked_fill(torch.arange(32) == 9, -100)}
    for _ in range(2):
        local = burst.shard_batch(batch)
        losses = torch.distributed.nn.functional.all_gather(engine(**local, use_cache=False).loss)
        labels = torch.distributed.nn.functional.all_gather((local["shift_labels"] != -100).sum())
        loss = sum(each * count for each, count in zip(losses, labels, strict=True)) / sum(labels)
        try:
            engine.backward(loss)
        except ValueError as error:
            return str(error)
    return ""


def test_losses_that_are_weighed_as_for_ulysses_are_refused() -> None:
    for message in run_ranks(_weighted_as_for_ulysses, 2, False):
        assert "give the loss of one batch different weights, from" in message
        assert "Remove code that adds up losses" in message
    for message in run_ranks(_weighted_as_for_ulysses, 2, True):
        assert not message, "equal weights are right"


def _autocast(rank: int) -> float:
    run = Run(cp=2, config={**NO_CLIPPING, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    engine = start(run, 2)
    loss = engine(**BATCHES[0], use_cache=False).loss  # a cache would widen values, too
    engine.backward(loss)
    return float(loss.detach())


def test_autocast_casts_what_goes_around_the_ring() -> None:
    """Rotary embeddings widen queries and keys, and leave values alone."""
    with torch.autocast("cpu", torch.bfloat16):
        truth = float(build(Run(), attention="sdpa")(**BATCHES[0]).loss.detach())
    for loss in run_ranks(_autocast, 2):
        assert loss == pytest.approx(truth, rel=2e-3)


# ------------------------------------------------------------------------------------------- zero.Init, checkpoints


def _zero_init(rank: int) -> int:
    """All three of the sizes that have to multiply, so that batch arithmetic is checked."""
    run = Run(cp=2, stage=3, config={"train_batch_size": 4, **NO_CLIPPING})
    config = configuration(run, 2)
    burst.install()
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = transformers.LlamaForCausalLM(llama())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**config, **SGD})
    engine.backward(engine(**BATCHES[0]).loss)
    engine.step()
    engine.set_train_batch_size(8)
    return engine.gradient_accumulation_steps()


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_zero_init_and_batch_arithmetic() -> None:
    assert run_ranks(_zero_init, 4) == [2] * 4


def _save_and_go_on(rank: int, directory: str, run: Run) -> dict[str, torch.Tensor]:
    engine = _with_adam(run)
    engine.backward(engine(**BATCHES[0]).loss)
    engine.step()
    engine.save_checkpoint(directory, tag="one")
    return _after_another_step(engine)


def _convert(rank: int, directory: str) -> None:
    """Run DeepSpeed's converter, in a fork that need not import DeepSpeed again."""
    arguments = ["--input_folder", f"{directory}/one", "--output_folder", f"{directory}/one_universal"]
    arguments += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    with mock.patch.object(sys, "argv", ["ds_to_universal", *arguments]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def _load(rank: int, directory: str, run: Run) -> dict[str, torch.Tensor]:
    engine = _with_adam(run)
    path, _ = engine.load_checkpoint(directory, tag="one_universal")
    assert path is not None, "there is no such checkpoint"
    return _after_another_step(engine)


def _after_another_step(engine: Any) -> dict[str, torch.Tensor]:
    """Train one more step; return all weights."""
    engine.backward(engine(**BATCHES[1]).loss)
    engine.step()
    found = {}
    for name, x in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([x], enabled=hasattr(x, "ds_id")):
            found[name] = x.detach().clone()
    return found


def _with_adam(run: Run) -> Any:
    """Adam, so that there is a state to carry over."""
    burst.install()
    model = build(run)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(run, 2))
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoints_from_one_ring_to_another(tmp_path: Path, stage: int) -> None:
    """Saved at cp2, loaded at cp4 (and at one rank), trained one more step: the weights of a run that goes on."""
    run = Run(cp=2, stage=stage, config=NO_CLIPPING)
    (truth, *_) = run_ranks(_save_and_go_on, 2, str(tmp_path), run)
    run_ranks(_convert, 1, str(tmp_path), init=False)
    universal = {**NO_CLIPPING, "checkpoint": {"load_universal": True}}
    for ranks in (1, 2, 4):
        loading = replace(run, cp=ranks, config=universal)
        found = run_ranks(_load, ranks, str(tmp_path), loading, timeout_s=90.0)[0]
        error, name = worst(found, truth)
        assert error <= 1e-5, (ranks, name, error)


# -------------------------------------------------------------------------------------------- models of one's own


class _Own(torch.nn.Module):
    """One layer that calls burst_attention itself, recomputed by DeepSpeed's checkpointing; inputs come sharded.

    It may return its loss in what looks like an output of transformers.
    """

    def __init__(self, returns_loss: bool = False) -> None:
        super().__init__()
        self.returns_loss = returns_loss
        self.embed = torch.nn.Embedding(96, 32)
        self.qkv = torch.nn.Linear(32, 96)
        self.head = torch.nn.Linear(32, 96)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        cp = burst.context() if dist.is_initialized() else burst_plugin.ContextParallel()
        out = burst_plugin.burst_attention(q, k, v, cp)
        return out.flatten(2)

    def forward(self, ids: torch.Tensor, shift_labels: torch.Tensor | None = None, **_: Any) -> Any:
        x = self.embed(ids)
        attended = deepspeed.checkpointing.checkpoint(self.attend, x) if dist.is_initialized() else self.attend(x)
        logits: torch.Tensor = self.head(x + attended)
        if self.returns_loss and shift_labels is not None:
            return CausalLMOutput(loss=burst.token_mean_loss(logits, shift_labels), logits=logits)
        return logits


def _own_evaluated(rank: int, cp: int) -> float:
    """A model of one's own that returns the mean over its shard in evaluation."""
    burst.install()
    torch.manual_seed(0)
    model = _OwnMean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(Run(cp=cp), 2))
    return float(burst.eval_batch(BATCHES[0], engine))


class _OwnMean(torch.nn.Module):
    """Without attention, so that what a rank's loss weighs is all there is to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(96, 32), torch.nn.Linear(32, 96)

    def forward(self, input_ids: torch.Tensor, shift_labels: torch.Tensor, **_: Any) -> CausalLMOutput:
        if dist.is_initialized():
            x = torch.zeros(*input_ids.shape, 1, 8)
            burst_plugin.burst_attention(x, x, x, burst.context())
        logits = self.head(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_ones_own_is_evaluated_over_the_whole_batch(ranks: int) -> None:
    torch.manual_seed(0)
    labels = torch.nn.functional.pad(BATCHES[0]["labels"][:, 1:], (0, 1), value=-100)
    truth = float(_OwnMean()(BATCHES[0]["input_ids"], labels).loss)
    assert run_ranks(_own_evaluated, ranks, ranks) == pytest.approx([truth] * ranks, rel=1e-5)


def _own(rank: int, stage: int, returns_loss: bool) -> dict[str, torch.Tensor]:
    burst.install()
    torch.manual_seed(0)
    model = _Own(returns_loss)
    config = configuration(Run(cp=4, stage=stage, config=NO_CLIPPING), 2)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    deepspeed.checkpointing.configure(None, deepspeed_config=config)
    local = burst.shard_batch(BATCHES[0])
    if returns_loss:
        labels = local["shift_labels"]
        loss = engine(local["input_ids"], shift_labels=labels, **{SHARD_KEY: local[SHARD_KEY]}).loss
    else:
        loss = burst.token_mean_loss(engine(local["input_ids"]), local["shift_labels"])
    engine.backward(loss)
    engine.step()
    return {name: x.detach() - before[name] for name, x in model.named_parameters()}


@pytest.mark.skipif(version("deepspeed").startswith("0.18."), reason="its own checkpointing does not run on CPUs")
@pytest.mark.parametrize("returns_loss", [False, True])
def test_a_model_of_ones_own_with_deepspeeds_checkpointing(returns_loss: bool) -> None:
    torch.manual_seed(0)
    model = _Own()
    labels = torch.nn.functional.pad(BATCHES[0]["labels"][:, 1:], (0, 1), value=-100)
    torch.nn.functional.cross_entropy(model(BATCHES[0]["input_ids"]).flatten(0, 1), labels.flatten()).backward()
    truth = {name: -x.grad for name, x in model.named_parameters() if x.grad is not None}
    for changes in run_ranks(_own, 4, 2, returns_loss):
        assert worst(changes, truth)[0] <= 1e-5


# -------------------------------------------------------------------------------------------------- groups, nodes


class _Mpu:
    """An mpu of the user's own, whose sequence-parallel groups are the rings."""

    def __init__(self, size: int) -> None:
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, dist.get_world_size(), size)]
        self.size, self.group = size, groups[dist.get_rank() // size]

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_group(self) -> Any:
        return self.group


def _own_mpu(rank: int, size: int | str) -> bool:
    burst.install()
    mpu = _Mpu(2)
    run = Run(cp=2, block={"context_parallel_size": size})
    model = build(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=mpu, config=configuration(run, 2))
    engine(**BATCHES[0])
    assert isinstance(engine.mpu, Unit)
    return burst.context(engine).group is mpu.group


@pytest.mark.parametrize("size", [2, "auto"])
def test_groups_of_an_mpu_are_used_if_they_fit(size: int | str) -> None:
    assert run_ranks(_own_mpu, 4, size) == [True] * 4


# ------------------------------------------------------------------------------------------------------ launcher

SCRIPT = """
import argparse, deepspeed, torch, transformers
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.AutoModelForCausalLM.from_config(config)
rows = [{"input_ids": (ids := torch.randint(0, 64, (30,))), "labels": ids} for _ in range(4)]
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=rows
)
for batch in loader:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    print(f"loss {engine.global_rank} {loss.item():.5f}\\n", end="", flush=True)  # one write: ranks share the pipe
"""


PLUGIN = ["-m", "burst_plugin.run", "--cpu"]


def _under_the_launcher(script: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
    command += [str(free_port()), "--module", *PLUGIN[1:], *script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, cwd=directory)


@pytest.mark.slow
def test_an_unmodified_script_under_the_launcher(tmp_path: Path) -> None:
    """With the block on, and off on one rank: the same losses."""
    (tmp_path / "train.py").write_text(SCRIPT)
    losses = {}
    for enabled in (True, False):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, **SGD}
        config |= {"zero_allow_untested_optimizer": True, "burst_attention": {"enabled": enabled}}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        script = [str(tmp_path / "train.py"), "--deepspeed_config", str(tmp_path / "ds.json")]
        done = _under_the_launcher(script, tmp_path) if enabled else launched([*PLUGIN, *script], ranks=1)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        losses[enabled] = re.findall(r"loss 0 (\d\.\d{5})", done.stdout)  # lines of two ranks may run into each other
        assert "burst_plugin in DeepSpeed" in done.stdout
    assert len(losses[True]) == 4
    assert losses[True] == losses[False]


def _one_model_after_another(rank: int) -> list[float]:
    """The loss of one model in a loop on whole batches: in an engine, in another without the first one's end, in a
    third after the second one's, and in one without the ring."""
    model, losses = build(Run()), []
    for stops, enabled in ((False, True), (True, True), (True, True), (True, False)):
        block = {"enabled": enabled, "context_parallel_size": 2 if enabled else "auto"}
        config = {**configuration(Run(config=NO_CLIPPING), 2), "burst_attention": block}
        if not enabled:
            model.set_attn_implementation("sdpa")
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)
        losses.append(float(engine(**BATCHES[0]).loss.detach()))
        engine.set_train_batch_size(4)
        if stops:
            stop(engine)
    return losses


def test_a_model_belongs_to_the_engine_made_last() -> None:
    burst.install()
    expected = [float(build(Run())(**BATCHES[0]).loss.detach())] * 4
    for losses in run_ranks(_one_model_after_another, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_stopped_engines_are_forgotten() -> None:
    def twice(rank: int) -> list[str]:
        said = []
        for _ in range(2):
            engine = start(Run(cp=2), 2)
            burst.shard_batch(BATCHES[0])
            stop(engine)
            with pytest.raises(ValueError) as error:  # noqa: PT011
                burst.shard_batch(BATCHES[0])
            said.append(str(error.value))
        return said

    for said in run_ranks(twice, 2):
        assert len(said) == 2
        assert all(text.startswith("got no engine, and 0 engines run with burst attention") for text in said)
