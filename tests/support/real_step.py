"""The most that one rank's tensors take in a whole training step at its real size, sharded, offloaded, in a ring.

    live, on_host = step_bytes(MODELS["llama3_8b"], setting)     # a setting of the plan, with context parallelism
    live.peak, live.shapes, on_host                              # bytes of a GPU, what they are, bytes on the host

The model is that of `measured_step`, on fake tensors. Real code runs: transformers' layers under its gradient
checkpoints, the loss and MLPs in chunks, what keeps attention and parks activations, and all ranks of a ring, one of
which counts. ZeRO-3 is a stand-in, see `_Shards`. What kernels allocate and free inside is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from burst_plugin import Strategy, VirtualRing
from burst_plugin.activations import host_memory, kept_attention
from burst_plugin.attention import _plan_of_rest
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.planning.memory import BUCKET
from burst_plugin.planning.model_shape import ModelShape
from burst_plugin.planning.setting import Setting
from burst_plugin.ring import autograd
from burst_plugin.ring.attention_pass import forward_program
from burst_plugin.ring.autograd import RingAttention
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.memo import Memo
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.request import Inputs, Request, scaled
from burst_plugin.sequence.layout import Tokens
from tests.support.fake_gpu import GPU, FakeStream, fake_gpu
from tests.support.live_bytes import LiveBytes
from tests.support.measured_step import in_chunks, llama
from tests.support.ring_memory import Pass

__all__ = ["step_bytes"]

T = TypeVar("T")
CPU = torch.device("cpu")
_NAME = "ring_of_one_process"


def step_bytes(shape: ModelShape, setting: Setting, rank: int = 0) -> tuple[LiveBytes, int]:
    """Run a step of a rank; return what was alive of all that it has, and the bytes that it parked on its host."""
    owner = type("Owner", (), {})()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _parking() as memory, LiveBytes() as live:
        live.counts = False
        ring = _Ring(shape, setting, rank, fake, live)
        model = llama(shape, setting, _NAME, ring.attention)
        in_chunks(model, setting)
        ids = torch.zeros(1, setting.local_tokens, dtype=torch.long)
        positions = torch.arange(setting.local_tokens)[None]
        kept_attention.follow_torch()
        if setting.offload:
            host_memory.offload_while_alive(owner)
        live.counts = True
        shards = _Shards(model, setting.gpus)
        loss = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        shards.turn_back()
        loss.backward()
        del owner
    return live, memory.parked_bytes


@contextmanager
def _parking() -> Iterator[host_memory.HostMemory]:
    """Yield where tensors are parked: in no memory, but what is on its way stays as long as on a GPU."""
    memory = host_memory.HostMemory(CPU)
    memory._stream = FakeStream()
    with ExitStack() as stack:
        for name in ("copy_to_pages", "copy_from_pages"):
            stack.enter_context(mock.patch.object(host_memory, name, _nothing))
        stack.enter_context(mock.patch.object(memory._pages, "take", return_value=[]))
        stack.enter_context(mock.patch.dict(host_memory._BY_DEVICE, {CPU: memory}))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=memory._stream))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", return_value=nullcontext()))
        yield memory


def _nothing(x: Tensor, pages: Sequence[Tensor]) -> None:
    """Copy nothing. A mock would remember the tensors."""


class _Shards:
    """Weights as ZeRO-3 has them: a shard of all, and whole ones of the layer at work and of the one that is next.

    A layer's gradients are made by autograd. Each is gone as soon as it is complete, to one of two buckets, of which
    shards go to the host. The model's own weights are made before and do not count.
    """

    def __init__(self, model: Any, ranks: int) -> None:
        body = model.model
        self._units = [body.embed_tokens, *body.layers, model.lm_head]
        self._whole: dict[int, list[Tensor]] = {}
        self._step = 1
        self._there = [torch.empty(-(-x.numel() // ranks), dtype=x.dtype) for x in model.parameters()]
        self._there += [torch.empty(BUCKET, dtype=torch.bfloat16) for _ in range(2)]
        for number, unit in enumerate(self._units[:-1]):
            for module in unit.modules():  # of which some are called again
                module.register_forward_pre_hook(lambda *_, n=number: self._begin(n))
            unit.register_forward_hook(lambda *_, n=number: self._end(n) if self._step == 1 else None)
        body.register_forward_hook(lambda *_: self._begin(len(self._units) - 1))
        for number, unit in enumerate(self._units):
            awaited = deque(unit.parameters())
            for parameter in unit.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda x, n=number, awaited=awaited: self._reduce(x, n, awaited)
                )

    def turn_back(self) -> None:
        """Go on in the order of the backward pass, which begins with the head."""
        self._step = -1
        self._begin(len(self._units) - 1)

    def _begin(self, number: int) -> None:
        for each in (number, number + self._step):
            if each not in self._whole and 0 <= each < len(self._units):
                self._whole[each] = [torch.empty(x.shape, dtype=x.dtype) for x in self._units[each].parameters()]

    def _end(self, number: int) -> None:
        del self._whole[number]

    def _reduce(self, parameter: Tensor, number: int, awaited: deque[Tensor]) -> None:
        parameter.grad = None
        awaited.pop()
        if not awaited:
            self._end(number)


class _Ring:
    """A ring on a GPU that is not there, for a model on a CPU, since autograd asks the driver of a GPU.

    Tensors of the model stand for themselves on both: those that the ring is given do not count, and those that it
    gives are made anew on the CPU when they are gone on the GPU.
    """

    def __init__(self, shape: ModelShape, setting: Setting, rank: int, fake: FakeTensorMode, live: LiveBytes) -> None:
        self._rank, self._fake, self._live = rank, fake, live
        self._keep, self._ulysses = setting.keep, setting.ulysses
        assert setting.offload or not setting.keep, "what is kept on a GPU would count on the CPU as well"
        self._kept: WeakKeyDictionary[Memo, list[Memo]] = WeakKeyDictionary()
        topology = setting.topology
        self._ranks = topology.ranks
        strategy = Strategy(kernel="torch_flash", ulysses_degree=setting.ulysses, parts=setting.parts)
        with self._at_work():
            ring = VirtualRing(topology, strategy, network=CopyNetwork(self._ranks, GPU))
            q, k, v = (
                torch.empty(1, setting.local_tokens, heads, shape.head_dim, dtype=torch.bfloat16, device=GPU)
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            tokens = Tokens(setting.tokens)
            self._request = scaled(Request(tokens=(tokens, tokens), lse=True))
            self._states = ring.rank_states
            self._known: list[dict[Any, Plan]] = [{} for _ in self._states]
            each = zip(self._states, self._known, strict=True)
            self._plans = [make_plan(state, Inputs(q, k, v), self._request, known) for state, known in each]

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        """Attend as transformers asks for it."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        memo = kept_attention.next_memo(self._keep, Inputs(q, k, v))
        out: Any = _Attention.apply(self, memo, q, k, v)  # type: ignore[no-untyped-call]
        return out, None

    def forward(self, memo: Memo | None, *qkv: Tensor) -> list[Tensor]:
        """Return out, and what the backward pass needs: q, k and v as the ring got them, its out and its lse."""
        with self._at_work():
            given = Inputs(*_on_gpu(*qkv))
            memos = [None] * self._ranks if memo is None else self._memos(memo, given)
            with autograd._one_pass(self._plans, "forward", CallId(1)):
                each = zip(self._plans, memos, strict=True)
                found = autograd.lockstep([forward_program(plan, CallId(1), given, of) for plan, of in each])
            outputs, saved = found[self._rank]
            exchanged = [outputs.out, *saved.given[:3]] if self._ulysses > 1 else []
            made = _shapes([*exchanged, saved.out, saved.lse])
            del found, outputs, saved, exchanged
        anew = _anew(made)
        return anew if self._ulysses > 1 else [anew[0], *qkv, *anew]

    def _memos(self, memo: Memo, given: Inputs) -> list[Memo]:
        """Return what each rank keeps of a call; others keep theirs beside this rank's."""
        if memo not in self._kept:
            self._kept[memo] = [memo if rank == self._rank else Memo(self._keep) for rank in range(self._ranks)]
        memos = self._kept[memo]
        for state, plan, of in zip(self._states, self._plans, memos, strict=True):
            if of.is_filled:
                caller: Any = SimpleNamespace(rank_state=state, plans=self._known[state.rank])
                of.rest = _plan_of_rest(of.first_kept(plan), given, self._request, caller)
        return memos

    def backward(self, dout: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        with self._at_work():
            done = Pass()
            q, k, v, out, lse, dout = _on_gpu(*saved, dout)
            done.plans, done.which = self._plans, CallId(1)
            done.saved_tensors = (q, k, v, None, None, out, lse) * self._ranks
            done.needs_input_grad = (False, False, False, *(True, True, True, False, False) * self._ranks)
            found = RingAttention.backward(done, *(dout, None, None) * self._ranks)
            made = _shapes(found[3 + 5 * self._rank : 6 + 5 * self._rank])
            del found
        return _anew(made)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Until the end of the block tensors are on the GPU, and what this rank makes in a program counts."""
        lockstep, before = autograd.lockstep, self._live.counts

        def of_all(programs: Sequence[Generator[None, None, T]]) -> list[T]:
            return lockstep([self._counted(each, rank) for rank, each in enumerate(programs)])

        with (
            fake_gpu(self._fake),
            mock.patch.object(autograd, "lockstep", of_all),
            mock.patch("burst_plugin.ring.memo._rows_from", _rows_from),
        ):
            self._live.counts = False
            try:
                yield
            finally:
                self._live.counts = before

    def _counted(self, program: Generator[None, None, T], rank: int) -> Generator[None, None, T]:
        while True:
            self._live.counts = rank == self._rank
            try:
                next(program)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                self._live.counts = False
            yield


class _Attention(torch.autograd.Function):
    """Attention of a rank; it saves what the ring's own function does."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, memo: Memo | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, *saved = ring.forward(memo, q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *ctx.ring.backward(dout, ctx.saved_tensors)


def _rows_from(first: int, plan: Plan) -> Tensor:
    """Return as many numbers as a rank has rows from a position on. Which they are, nothing here knows."""
    runs = plan.forward.route.runs["q"][plan.rank_state.ring_rank]
    assert all(run.stride == 1 for run in runs)
    rows = sum(max(0, run.last + 1 - max(first, run.start)) for run in runs)
    return torch.empty(rows, dtype=torch.int64, device=GPU)


def _on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU) for x in tensors]


def _shapes(tensors: Sequence[Any]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tensors]


def _anew(made: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape, dtype in made]
