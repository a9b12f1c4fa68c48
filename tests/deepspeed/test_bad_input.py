"""What goes wrong on the way into a run: one clear error, on every rank, before anything is built if it can be."""

from __future__ import annotations

import base64
import dataclasses
import re
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import burst_plugin
import burst_plugin.deepspeed as burst
from burst_plugin import ContextParallel, shard_batch
from burst_plugin.deepspeed import adapter, arguments
from burst_plugin.deepspeed.config import BLOCK
from burst_plugin.deepspeed.loaders import exchanged
from burst_plugin.huggingface.models import problems
from tests.support.deepspeed_run import VOCAB, Run, build, configuration, draw, llama, start
from tests.support.ranks import as_on_gpus, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.deepspeed

RUN = Run(cp=2)
BATCH = draw(1)[0]


def _errors(fn: Callable[..., Any], ranks: int, *args: Any) -> list[str]:
    """The last line of every rank's error; all have to have one."""
    outcomes = run_ranks_outcomes(fn, ranks, *args, timeout_s=60.0)
    assert all(outcome.error for outcome in outcomes), "a rank has no error"
    unheard = [outcome.error for outcome in outcomes if not outcome.reported]
    assert not unheard, "\n".join(map(str, unheard))
    return [(outcome.error or "").strip().splitlines()[-1] for outcome in outcomes]


def _initialize(rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """`deepspeed.initialize` with changed arguments."""
    burst.install()
    model = build(RUN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"model": model, "optimizer": optimizer, "config": configuration(RUN, 2)}
    change(arguments)
    deepspeed.initialize(**arguments)


def _block(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments["config"]["burst_attention"].update(options)


def _config(**options: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments["config"].update(options)


def _only_rank_1(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: change(arguments) if dist.get_rank() == 1 else None


class _Mpu:
    """An mpu of the user's own."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def __getattr__(self, name: str) -> Any:
        for kind, size in self.__dict__["sizes"].items():
            if name == f"get_{kind}_parallel_world_size":
                return lambda: size
            if name == f"get_{kind}_parallel_group":
                return lambda: dist.new_group([dist.get_rank()], use_local_synchronization=True)
        raise AttributeError(name)


class _Unreadable(torch.nn.Linear):
    """A model that cannot be looked through."""

    def modules(self) -> Any:
        raise RuntimeError("no modules today")


def _unreadable(arguments: dict[str, Any]) -> None:
    arguments["model"] = _Unreadable(2, 2)


def test_whatever_is_wrong_on_one_rank_is_heard_of_on_all() -> None:
    """Also one that was not foreseen: the others would wait for this rank until the time-out."""
    for line in _errors(_initialize, 2, _only_rank_1(_unreadable)):
        assert "ValueError: rank 1: RuntimeError('no modules today')" in line


class _Attention(torch.nn.Linear):
    pass


_Attention.__name__ = "DistributedAttention"


def _with_ulysses_layer(arguments: dict[str, Any]) -> None:
    arguments["model"].add_module("inner", _Attention(2, 2))


def _pipeline(arguments: dict[str, Any]) -> None:
    deepspeed.init_distributed("gloo")
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    arguments["model"] = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss())


class _Pair(torch.nn.Module):
    """A student and its teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = build(RUN), build(RUN)


def _two_models(arguments: dict[str, Any]) -> None:
    arguments["model"] = _Pair()
    arguments["optimizer"] = torch.optim.SGD(arguments["model"].parameters(), lr=0.1)


def _ulysses_mpu(arguments: dict[str, Any]) -> None:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    arguments["mpu"] = parallel_state_sp


CASES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_block(context_parallel_size=3), "context_parallel_size=3 does not divide the 2 ranks; take a divisor"),
    (_block(contxt_parallel_size=2), 'did you mean "context_parallel_size"'),
    (_block(ranks_per_node=3), "ranks_per_node=3 does not divide the 2 ranks"),
    (
        _config(train_batch_size=4, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=2),
        "train_batch_size=4 counts 2 data-parallel ranks, but 2 of them share each sequence: with Trainer or "
        'Accelerate set ParallelismConfig(sp_size=2, sp_backend="deepspeed"), also for a reference model; else leave '
        "train_batch_size out, or write 2",
    ),
    (_config(gradient_allreduce_op="sum"), "gradient_allreduce_op='sum' does not go together"),
    (_config(sequence_parallel_size=4), "sequence_parallel_size=4 (Ulysses) contradicts context_parallel_size=2"),
    (_config(compile={"deepcompile": True, "passes": ["autosp"]}), "compile.passes=['autosp'] does not go together"),
    (lambda arguments: arguments.update(mesh_param=(1, 2)), "mesh_param=(1, 2) does not go together"),
    (lambda arguments: arguments.update(mpu=_Mpu(model=2)), "mpu=_Mpu has model-parallel size 2"),
    (lambda arguments: arguments.update(mpu=_Mpu(data=2)), "mpu=_Mpu conflicts: its sequence-parallel size is 1"),
    (lambda arguments: arguments.update(mpu=_Mpu(sequence=2)), "mpu=_Mpu conflicts: its sequence-parallel ranks are"),
    (_ulysses_mpu, "parallel_state_sp belongs to Ulysses, which does not go together"),
    (_with_ulysses_layer, "the model has DistributedAttention layers (Ulysses)"),
    (_config(expert_parallel={"enabled": True}), "expert_parallel.enabled=True does not go together"),
    (
        _two_models,
        "_Pair has 2 models of transformers, LlamaForCausalLM, LlamaForCausalLM, but only one can run on a ring",
    ),
    (_pipeline, "a PipelineModule does not go together with burst_attention"),
    (_only_rank_1(_config(gradient_allreduce_op="sum")), "rank 1: gradient_allreduce_op='sum' does not go together"),
    (
        _only_rank_1(_block(layuot="striped")),
        'rank 1: "burst_attention": unknown key "layuot" (did you mean "layout"?)',
    ),
    (_only_rank_1(_block(enabled=False)), 'all ranks must have the same "burst_attention"'),
    (_only_rank_1(_block(layout="striped")), 'all ranks must have the same "burst_attention"'),
    (_only_rank_1(_block(context_parallel_size=1)), 'all ranks must have the same "burst_attention"'),
]


def _initialize_all(rank: int) -> list[str]:
    """What every case says; all in the same processes, since a refused one leaves nothing behind."""
    return [_said(_initialize, rank, change) for change, _ in CASES]


def _said(fn: Callable[..., Any], *args: Any) -> str:
    """The error of a call; empty if it has none."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_initialisation_is_refused_on_every_rank() -> None:
    for found in run_ranks(_initialize_all, 2, timeout_s=90.0):
        for line, (_, message) in zip(found, CASES, strict=True):
            assert line.startswith("ValueError: "), message
            assert message in line


# ------------------------------------------------------------------------------------------------- at the first step


class _Own(torch.nn.Module):
    """A model that attends to what it is given, and not to the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(96, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


def _without_the_ring(rank: int) -> None:
    burst.install()
    model = _Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(RUN, 2))
    engine(BATCH["input_ids"])


def _switched_back(rank: int) -> None:
    engine = start(RUN, 2)
    engine.module.set_attn_implementation("sdpa")
    engine(**BATCH)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_without_the_ring, "burst_attention is enabled, but _Own has computed a forward without it"),
        (
            _switched_back,
            "without the ring, .*: its attn_implementation is another one now; switch it back to 'burst'",
        ),
    ],
)
def test_a_model_that_does_not_use_the_ring_is_told_at_the_first_step(
    fn: Callable[[int], None], message: str
) -> None:
    for line in _errors(fn, 2):
        assert re.search(message, line), line


def _changed(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**BATCH, **changes}


BATCHES: list[tuple[dict[str, torch.Tensor], str]] = [
    (draw(1, length=16)[0], "rank 0: batch=[2, 32] with checksum "),
    (draw(1, seed=5)[0], "all ranks of a context-parallel group take the same batch"),
    (_changed(attention_mask=torch.ones(2, 1, 32, 32)), "rank 1: attention_mask of shape [2, 1, 32, 32] is not a"),
    (_changed(extra=torch.ones(3, 3)), "rank 1: extra of shape [3, 3] cannot be cut along the sequence"),
    (
        _changed(input_ids=torch.ones(0, 4)),
        "rank 1: a batch needs input_ids, a tensor of shape [batch, tokens], got a tensor of shape [0",
    ),
    (_changed(cu_seq_lens_q=torch.tensor([0, 5, 32])), "rank 1: cu_seq_lens_q from 0 to 32 does not fit"),
    (_changed(labels=torch.ones(2)), "rank 1: labels cannot be cut along the sequence: got a tensor of shape [2]"),
    (_changed(labels=torch.ones(2, 32, 3)), "rank 1: labels of shape [2, 32, 3] are not one for each token, [2, 32]"),
    (_changed(labels=BATCH["labels"].tolist()), "rank 1: labels cannot be cut along the sequence: got a list"),
    (_changed(position_ids=torch.arange(32)), "rank 1: position_ids cannot be cut along the sequence: got a tensor"),
    (
        _changed(position_ids=[list(range(32))] * 2),
        "rank 1: position_ids cannot be cut along the sequence: got a list",
    ),
    (_changed(shift_labels=torch.ones(64)), "rank 1: shift_labels cannot be cut along the sequence: got a tensor"),
    (_changed(labels=BATCH["labels"].roll(1)), "all ranks of a context-parallel group take the same batch"),
    (_changed(attention_mask=torch.full((2, 32), -1e4)), "rank 1: attention_mask has values below 0"),
    (
        _changed(attention_mask=torch.arange(32).expand(2, -1)),
        "rank 1: attention_mask has values above 1, as one that",
    ),
    (
        _changed(attention_mask={"full_attention": torch.ones(2, 32)}),
        "rank 1: attention_mask is a dict; give padding",
    ),  # type: ignore[arg-type]
    (_changed(seq_idx=torch.arange(32).expand(2, -1) // 20), "rank 1: seq_idx alone does not tell a ring where"),
    (_changed(position_ids=torch.arange(2, 66, 2).expand(2, -1)), "rank 1: position_ids go from 2 to 4 at token 1"),
]


def _differ(rank: int) -> list[str]:
    """Rank 1's batches are others than rank 0's."""
    engine = start(RUN, 2)
    return [_said(lambda batch: engine(**batch), other if rank else BATCH) for other, _ in BATCHES]


def test_batches_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    for found in run_ranks(_differ, 2):
        for line, (_, message) in zip(found, BATCHES, strict=True):
            assert line.startswith("ValueError: "), message
            assert message in line
            assert ("let the sampler count" in line) == (" batch=[" in line), "a hint for batches that differ only"
            assert ("do not prepare the loader" in line) == ("let the sampler count" in line)


def _ignoring(rank: int) -> list[str]:
    """What is said of labels that are ignored by another number than -100, which all ranks have."""
    cp = ContextParallel(dist.group.WORLD)
    labels = BATCH["labels"].index_fill(1, torch.arange(3), -1)
    batches = [_changed(labels=labels), {"input_ids": BATCH["input_ids"], "shift_labels": labels}]
    return [_said(lambda batch: shard_batch(batch, cp), batch) for batch in batches]


def test_labels_to_ignore_are_minus_100_on_every_rank() -> None:
    for found in run_ranks(_ignoring, 2):
        assert "ValueError: labels has 4 values below 0 other than -100" in found[0]  # two follow no token
        assert "ValueError: shift_labels has 6 values below 0 other than -100" in found[1]
        assert "write shift_labels.masked_fill(shift_labels < 0, -100), and give the loss ignore" in found[1]


def _differ_later(rank: int) -> list[str]:
    """Where ranks compare calls 1, 2, 4, ... only, as on GPUs; the third batch is another one."""
    cp = as_on_gpus(ContextParallel(dist.group.WORLD))
    batches = [BATCH, BATCH, draw(1, seed=5)[0] if rank else BATCH]
    return [_said(lambda batch: shard_batch(batch, cp), batch) for batch in batches]


def test_every_batch_is_compared_whatever_else_is() -> None:
    for found in run_ranks(_differ_later, 2):
        assert found[:2] == ["", ""]
        assert "all ranks of a context-parallel group take the same batch" in found[2]


def _not_sharded(rank: int) -> None:
    engine = start(RUN, 2)
    inner = engine.module.model  # beneath the hook that cuts batches
    inner(BATCH["input_ids"])


def _backward_in_evaluation(rank: int) -> None:
    engine = start(RUN, 2)
    engine.eval()
    engine.backward(engine(**BATCH).loss)


def _backward_of_shards_in_evaluation(rank: int) -> None:
    engine = start(RUN, 2)
    engine.eval()
    engine.backward(engine(**burst.shard_batch(BATCH)).loss)


def _tuples(rank: int) -> None:
    start(RUN, 2)(**BATCH, return_dict=False)


def _dicts(rank: int) -> None:
    _returning(lambda output: {"loss": output.loss, "logits": output.logits})


def _losses(rank: int) -> None:
    _returning(lambda output: type(output)(loss=output.loss[None], logits=output.logits))


def _returning(change: Callable[[Any], Any]) -> None:
    """A step of a model that returns its output in another form."""
    _engine_returning(change)(**BATCH)


def _engine_returning(change: Callable[[Any], Any]) -> Any:
    burst.install()
    model = build(RUN)
    plain = type(model).forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: change(plain(self, *args, **kwargs)), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(RUN, 2))
    return engine


def _own_loss(rank: int) -> None:
    """A model whose loss adds something that is not a sum over tokens."""

    def change(output: Any) -> Any:
        output["loss"] = output.loss + 1.0
        return output

    _returning(change)


class _OwnHead(torch.nn.Module):
    """A module around a model, with a loss on the labels that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = build(RUN)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.llm(input_ids=input_ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class _Around(torch.nn.Module):
    """A module that leaves the loss to the model in it, which it also holds in part, and twice."""

    def __init__(self) -> None:
        super().__init__()
        model = build(RUN)
        self.backbone, self.llm, self.again = model.model, model, torch.nn.ModuleList([model])

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.llm(**batch).loss


def _wrapped(rank: int, kind: Callable[[], torch.nn.Module]) -> float:
    burst.install()
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(RUN, 2))
    return float(engine(**BATCH).detach())


class _Pooling(_OwnHead):
    """A head on the last token: of the sequence, as it is meant, not of each rank's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = self.llm.model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.llm(input_ids=input_ids).last_hidden_state[:, -1].sum()
        return found


@pytest.mark.parametrize("kind", [_OwnHead, _Pooling])
def test_a_batch_without_labels_is_not_cut_unasked(kind: Callable[[], torch.nn.Module]) -> None:
    for line in _errors(_wrapped, 2, kind):
        assert "got a batch without labels in training: a loss on" in line


def test_a_module_around_a_model_may_leave_the_loss_to_it() -> None:
    truth = float(build(RUN)(**BATCH).loss.detach())
    assert run_ranks(_wrapped, 2, _Around) == [pytest.approx(truth, rel=1e-6)] * 2


def _engine() -> Any:
    burst.install()
    model = build(RUN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(RUN, 2))
    return engine


def _by_position(rank: int) -> list[float]:
    engine = start(RUN, 2)
    local = burst.shard_batch(BATCH)
    by_name = engine(**local).loss
    return [float(by_name.detach()), float(engine(local.pop("input_ids"), **local).loss.detach())]


def test_a_batch_that_is_cut_already_may_come_by_position() -> None:
    for by_name, by_position in run_ranks(_by_position, 2):
        assert by_position == by_name


def _parts_of_shards(rank: int) -> list[str]:
    engine = _engine()
    local = burst.shard_batch(BATCH)
    labels = local.pop("shift_labels")
    found = [
        _said(lambda: engine(**local, labels=labels)),
        _said(lambda: engine(**local, shift_labels=labels, num_items_in_batch=6.0)),
        _said(lambda: engine(input_ids=local["input_ids"], labels=labels)),
    ]
    with torch.no_grad():
        found.append(_said(lambda: engine(**local, shift_labels=labels, num_items_in_batch=6.0)))  # to look at logits
        engine.eval()
        found.append(_said(lambda: engine(input_ids=local["input_ids"])))
        cache = engine(input_ids=BATCH["input_ids"], use_cache=True).past_key_values
        engine.train()
    found.append(_said(lambda: engine(**BATCH, past_key_values=cache)))
    return found


def test_parts_of_a_shard_that_do_not_fit_together_are_refused() -> None:
    expected = [
        "labels of a shard are shifted already; pass them as shift_labels",
        "num_items_in_batch came with a batch that is cut already",
        "got the ids of a shard without its entry 'burst', as if they were a whole sequence",
        "",
        "got the ids of a shard without its entry 'burst', as if they were a whole sequence",
        "past_key_values are not spread over ranks",
    ]
    for found in run_ranks(_parts_of_shards, 2):
        for said, message in zip(found, expected, strict=True):
            assert message in said


def _from_hidden_states(rank: int) -> list[str]:
    """A score on the last token, beside the loss of a batch that the model cuts."""
    engine = _engine()
    outputs = [engine(**BATCH, output_hidden_states=True) for _ in range(2)]
    scored = outputs[0].loss + outputs[0].hidden_states[-1][:, -1].square().sum()
    return [_said(lambda: engine.backward(scored)), _said(lambda: engine.backward(outputs[1].loss))]


def test_of_a_batch_that_is_cut_unseen_only_the_loss_has_a_gradient() -> None:
    for scored, plain in run_ranks(_from_hidden_states, 2):
        assert "a loss was computed from the output of a model that cuts its batch in its forward" in scored
        assert plain == ""


def _turns_that_are_alike(rank: int, batches: list[dict[str, torch.Tensor]]) -> list[str]:
    engine = _engine()
    loader = burst.sharded_loader([batches[rank]], engine, exchange=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(loader)) == 2
    return [str(each.message) for each in caught if "drew the same batch" in str(each.message)]


def test_ranks_that_take_turns_with_one_batch_are_told() -> None:
    other = {**BATCH, "input_ids": BATCH["input_ids"].flip(1)}
    assert [len(found) for found in run_ranks(_turns_that_are_alike, 2, [BATCH, BATCH])] == [1, 1]
    assert run_ranks(_turns_that_are_alike, 2, [BATCH, other]) == [[], []]


def _turns_with_a_list(rank: int) -> str:
    """A collator of rank 1's gives a list of samples."""
    loader = burst.sharded_loader([[BATCH] if rank else BATCH], _engine(), exchange=True)
    return _said(lambda: list(loader))


def test_batches_that_are_no_dicts_are_refused_on_every_rank() -> None:
    for said in run_ranks(_turns_with_a_list, 2):
        assert "whole tensors by name, but some ranks have other batches: {1: 'list'}" in said


def _turns_beside_a_pass(rank: int) -> str:
    """A loader's thread asks for the others' batches while another thread is in a pass."""
    cp = ContextParallel(dist.group.WORLD)
    with cp.rank_state.alone():
        return _said(exchanged, BATCH, cp)


def test_ranks_do_not_exchange_batches_in_the_middle_of_a_pass() -> None:
    for said in run_ranks(_turns_beside_a_pass, 2):
        assert said.startswith("RuntimeError: burst attention was entered, or ranks were to compare a batch")


def _later_loss(rank: int) -> list[str]:
    """A loss that is another one from the second step on."""
    calls: list[Any] = []

    def change(output: Any) -> Any:
        calls.append(output)
        output["loss"] = output.loss + (0.002 if len(calls) > 3 else 0.0)  # as an auxiliary loss is
        return output

    engine = _engine_returning(change)
    burst.eval_batch(BATCH, engine=engine)
    return [_said(lambda: engine(**BATCH)) for _ in range(4)]


def test_losses_are_compared_again_and_again_in_training() -> None:
    for found in run_ranks(_later_loss, 2):
        assert found[:3] == ["", "", ""]
        assert "does not honour shift_labels and num_items_in_batch, or adds to them" in found[3]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_not_sharded, "LlamaAttention got a batch that is not sharded: pass what burst_plugin.shard_batch"),
        (_backward_in_evaluation, "backward pass of a model in evaluation mode, in which batches are"),
        (_backward_of_shards_in_evaluation, "backward pass of a model in evaluation mode, in which batches are"),
        (_tuples, "LlamaForCausalLM returns a tuple, in which no loss is found"),
        (_dicts, "LlamaForCausalLM returns a dict, in which no loss is found"),
        (_losses, "LlamaForCausalLM returns losses of shape [1], in which no loss is found"),
        (_own_loss, "the mean over shift_labels: it does not honour shift_labels and num_items_in_batch, or adds"),
    ],
)
def test_what_would_train_wrongly_is_refused(fn: Callable[[int], None], message: str) -> None:
    for line in _errors(fn, 2):
        assert message in line


# ------------------------------------------------------------------------------------------------- models


def test_models_that_cannot_run_on_a_ring_are_refused_by_name() -> None:
    def found(model: Any) -> str:
        return "; ".join(problems(model))

    t5 = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert "T5ForConditionalGeneration cannot run on a ring: it is an encoder-decoder" in found(
        transformers.T5ForConditionalGeneration(t5)
    )
    config = transformers.MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1)
    mamba = transformers.MambaForCausalLM(config)
    assert problems(mamba) == []
    mamba.own = torch.nn.ModuleList([torch.nn.Conv1d(2, 2, 3)])
    assert "carries a state along the sequence (in ModuleList)" in found(mamba)
    gpt = transformers.OpenAIGPTConfig(vocab_size=8, n_embd=8, n_layer=1, n_head=2)
    assert "does not go through transformers' AttentionInterface" in found(transformers.OpenAIGPTLMHeadModel(gpt))
    assert problems(build(Run())) == []
    tagger = transformers.LlamaForTokenClassification(llama(num_hidden_layers=1))
    assert "its loss is that of ForTokenClassification, but labels are shifted by one token" in found(tagger)
    assert problems(transformers.LlamaModel(llama(num_hidden_layers=1))) == []
    small = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    bert = transformers.BertForPreTraining(transformers.BertConfig(**small))
    assert "its loss is that of ForPreTraining" in found(bert)
    ibert = transformers.IBertModel(transformers.IBertConfig(**small), add_pooling_layer=False)
    assert "it counts positions by itself" in found(ibert)
    assert "its pooler takes the first token" in found(transformers.BertModel(transformers.BertConfig(**small)))
    assert "its pooler" not in found(
        transformers.BertModel(transformers.BertConfig(**small), add_pooling_layer=False)
    )
    esm = transformers.EsmConfig(**small, pad_token_id=0, mask_token_id=1, token_dropout=True)
    assert "token_dropout scales embeddings by the masked share" in found(transformers.EsmModel(esm))
    assert "it counts positions by itself" in found(transformers.EsmModel(esm))
    mobile = transformers.MobileBertConfig(
        **small, embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8, trigram_input=True
    )
    assert "trigram_input joins neighbouring tokens" in found(transformers.MobileBertModel(mobile))
    opt = transformers.OPTConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8, layerdrop=0.1
    )
    assert "layerdrop leaves out whole layers at random" in found(transformers.OPTForCausalLM(opt))


def _masked_language_model(rank: int) -> None:
    burst.install()
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(vocab_size=VOCAB, pad_token_id=0, **shape)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(replace(RUN, cp=1, block={"loss": "token_mean"}), 1)
    )


def test_labels_are_not_counted_for_another_loss_on_a_ring_of_one_either() -> None:
    (line,) = _errors(_masked_language_model, 1)
    assert "ModernBertForMaskedLM cannot run on a ring: its loss is that of ForMaskedLM" in line


class _ForConditionalGeneration(transformers.LlamaForCausalLM):
    """As decoders that can also take images are called, whose loss is the same."""


def test_a_ring_of_one_runs_what_mixes_tokens() -> None:
    assert problems(_ForConditionalGeneration(llama()), is_whole=True) == []
    mamba = transformers.MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1)
    assert problems(transformers.MambaForCausalLM(mamba), is_whole=True) == []


@pytest.mark.parametrize(
    ("found", "warns"), [("0.17.9", True), ("0.18.0", False), ("0.19.8", False), ("0.20.0", True)]
)
def test_versions_outside_the_tested_range_say_so(monkeypatch: pytest.MonkeyPatch, found: str, warns: bool) -> None:
    monkeypatch.setattr(adapter, "version", lambda package: found)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapter.warn_if_untested("deepspeed", ("0.18", "0.19"))
    expected = [f"deepspeed {found} is outside the tested range, 0.18 to 0.19"] if warns else []
    assert [str(each.message).split(":")[0] for each in said] == expected


def test_a_configuration_that_is_read_here_is_read_as_strictly_as_by_deepspeed(tmp_path: Path) -> None:
    """In a file or in base64; DeepSpeed, which is given what was read, sees no key twice."""
    twice = '{"burst_attention": {"layout": "zigzag", "layout": "striped"}}'
    path = tmp_path / "ds.json"
    path.write_text(twice)
    for config in (str(path), path, base64.urlsafe_b64encode(twice.encode()).decode()):
        with pytest.raises(ValueError, match='has "layout" more than once in one block'):
            arguments.find_configuration({"config": config})
    for text in ("5", "[1]", "{"):
        path.write_text(text)
        assert arguments.find_configuration({"config": str(path)}) is None, "DeepSpeed says what is wrong with it"


def test_helpers_before_initialize_say_what_is_missing() -> None:
    def without(rank: int) -> None:
        burst.install()
        burst.shard_batch(BATCH)

    (line,) = _errors(without, 1)
    assert (
        'got no engine, and 0 engines run with burst attention; expected one: call deepspeed.initialize with "bur'
        in line
    )
    assert "burst_plugin" in sys.modules
    assert burst_plugin.__version__


def test_a_script_may_use_ulysses_of_deepspeed_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState, PartialState

    from burst_plugin.deepspeed import trainer

    for state in (AcceleratorState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    given = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2}
    assert trainer.requested_size(lambda **options: options, **given) == given


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, 'has no block "burst_attention" at its top level; write "burst_attention": {"enabled": true} there'),
        ({"burst_atention": {}}, 'has no block "burst_attention" at its top level, only "burst_atention"; write'),
        ({"zero_optimization": {BLOCK: {}}}, 'top level, only "zero_optimization.burst_attention"; write'),
        ({BLOCK: {"enabled": False}}, '"burst_attention" in the DeepSpeed configuration has "enabled": false; write'),
    ],
)
def test_sp_size_without_the_block_says_why_there_are_no_rings(
    config: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed, which speaks of its own attention, has the last word; Ulysses that runs is left alone."""
    from burst_plugin.deepspeed import trainer

    def refuse(**options: Any) -> None:
        raise ValueError("core_attn_implementation='None' does not match")

    monkeypatch.setattr(trainer, "_deepspeed_config", lambda: config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"Ulysses refuses: core_attn.* does not match") as error:
            trainer.requested_size(refuse, sequence_parallel_size=2)
    assert reason in str(error.value)
    assert [reason in str(warning.message) for warning in caught] == [True] * (BLOCK not in config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trainer.requested_size(lambda **options: "an mpu", sequence_parallel_size=2) == "an mpu"


def test_accelerate_fills_in_no_auto_of_the_block_nor_of_one_by_another_name() -> None:
    from burst_plugin.deepspeed.trainer import leave_block_alone

    filled: list[str] = []
    for config, block in (
        ({BLOCK: {}}, BLOCK),
        ({"burst_atention": {}}, "burst_atention"),
        ({"zero_optimization": {BLOCK: {}}}, f"zero_optimization.{BLOCK}"),
    ):
        plugin = types.SimpleNamespace(hf_ds_config=types.SimpleNamespace(config=config))
        for key in (f"{block}.layout", "train_batch_size"):
            leave_block_alone(lambda plugin, key: filled.append(key), plugin, key)
    assert filled == ["train_batch_size"] * 3


def test_trainers_of_trl_with_other_losses_are_refused_by_name() -> None:
    from burst_plugin.deepspeed.adapter import Adapter
    from burst_plugin.deepspeed.trl_trainers import follow_trainer

    @dataclasses.dataclass
    class SFTConfig:
        max_length: int | None = 1024
        process_index: int = 0

    def trainer(name: str, module: str, *bases: type, args: Any = None) -> Any:
        own = {"__module__": module, "compute_loss": None, "model": torch.nn.Identity()}
        return type(name, bases, own | {"args": args or SFTConfig(None)})()

    adapter = Adapter()
    theirs = {name: type(trainer(name, f"trl.{name}")) for name in ("SFTTrainer", "DPOTrainer", "GOLDTrainer")}
    follow_trainer(adapter, trainer("Mine", "__main__", theirs["SFTTrainer"]), 2)
    assert not adapter.gathering
    follow_trainer(adapter, mine := trainer("Mine", "__main__", theirs["DPOTrainer"]), 2)
    assert mine.model in adapter.gathering
    with pytest.raises(ValueError, match="GOLDTrainer with sp_size=2 is not supported with burst_attention: it comp"):
        follow_trainer(adapter, trainer("Mine", "__main__", theirs["GOLDTrainer"]), 2)
    steps = {"__module__": "trl.online", "training_step": None, "args": SFTConfig(None)}
    steps_by_itself = type("OnlineDPOTrainer", (), steps)
    with pytest.raises(ValueError, match="OnlineDPOTrainer with sp_size=2 is not supported"):
        follow_trainer(adapter, steps_by_itself(), 2)
    with pytest.warns(UserWarning, match=r"SFTConfig\(max_length=1024\) is TRL's default: each text is cut to 1,024"):
        follow_trainer(adapter, trainer("Mine", "__main__", theirs["SFTTrainer"], args=SFTConfig()), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args in (SFTConfig(2048), SFTConfig(None), SFTConfig(process_index=1)):
            follow_trainer(adapter, trainer("Mine", "__main__", theirs["SFTTrainer"], args=args), 2)


@pytest.mark.huggingface
def test_trainers_and_options_of_ms_swift_that_change_the_loss_are_refused_by_name() -> None:
    from burst_plugin.deepspeed.adapter import Adapter
    from burst_plugin.deepspeed.swift_trainers import follow_swift_trainer

    def trainer(name: str, multimodal: bool = False, cut: int = 1, **options: Any) -> Any:
        model = types.SimpleNamespace(is_multimodal=multimodal, model_type="qwen3_vl")
        parts = {
            "args": types.SimpleNamespace(use_logits_to_keep=None, **options),
            "template": types.SimpleNamespace(sequence_parallel_size=cut, model_meta=model),
            "compute_loss": lambda *args: None,
        }
        return type(name, (), {"__module__": "swift.trainers", **parts})()

    def follow(given: Any) -> bool:
        return follow_swift_trainer(Adapter(), given, 2)

    assert not follow(types.SimpleNamespace())
    taken = trainer("Seq2SeqTrainer", enable_dft_loss=False)
    assert follow(taken)
    assert taken.args.use_logits_to_keep is False
    derived = type("Mine", (type(trainer("Seq2SeqTrainer")),), {"__module__": "__main__"})
    assert follow(derived())
    for given, message in (
        (trainer("EmbeddingTrainer"), "EmbeddingTrainer of ms-swift with sp_size=2 is not supported with burst_at"),
        (trainer("Seq2SeqTrainer", enable_dft_loss=True), "ms-swift's enable_dft_loss=True is a loss that is not"),
        (trainer("Seq2SeqTrainer", enable_channel_loss=True), "enable_channel_loss=True is a loss for each channel"),
        (trainer("Seq2SeqTrainer", predict_with_generate=True), "predict_with_generate=True is generation in ev"),
        (trainer("Seq2SeqTrainer", cut=4), "sequence_parallel_size=4 is ms-swift's own cut, which is not supported"),
        (trainer("Seq2SeqTrainer", multimodal=True), "model_type=qwen3_vl is a model with images, sound or video"),
    ):
        with pytest.raises(ValueError, match=message):
            follow(given)
