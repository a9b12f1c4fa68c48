"""Attention that checkpoints do not compute twice.

A checkpoint runs a function, keeps only its inputs, and runs it again in the backward pass. Outputs of attention in
the first run are kept here, call by call, and returned again in the second. (DistFlashAttn, arXiv 2310.03294; by
share of the sequence: BurstEngine, 2509.19836.)

This works for PyTorch's checkpoints, reentrant or not, and for checkpoints that frameworks derive from them: the
function that they run is wrapped. A selective checkpoint whose policy saves the outputs of attention has all of them
kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from burst_plugin.activations.host_memory import host_memory, park_inputs_of, park_inputs_of_frames
from burst_plugin.ring.kept_outputs import KeptOutputs
from burst_plugin.ring.request import Inputs
from burst_plugin.strategy import Strategy

_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

_MARK = "_burst_plugin_followed"
# PyTorch's generator of a checkpoint that is not reentrant: since torch 2.14, and before.
_NON_REENTRANT = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_CONTEXT_FN, _DEBUG = 2, 4  # among the arguments of the older one
# The operations of PyTorch whose outputs a policy saves if it saves those of attention.
_ATTENTION = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
)

Policy = Callable[..., Any]
_OTHER_CALLS = (
    "a checkpoint makes other calls to other ranks again than it made the first time: layers must make the same "
    "calls each time"
)


class _Thread(threading.local):
    """The runs of checkpoints that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.runs: list[_CheckpointRun] = []


_THREAD = _Thread()


class _Checkpoint:
    """The kept outputs of the calls inside one checkpoint, in order; None for a call that keeps nothing."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy
        self.of_calls: list[KeptOutputs | KeptTensors | None] = []

    def saves_attention(self, inputs: Inputs) -> bool:
        """Return whether the policy of a selective checkpoint has outputs of attention saved."""
        if self.policy is None:
            return False
        context = checkpoint.SelectiveCheckpointContext(is_recompute=False)
        saves = (True, checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_SAVE)
        return any(self.policy(context, operation, *inputs[:3]) in saves for operation in _ATTENTION)


class KeptTensors:
    """The tensors that a call other than attention received from other ranks in the first run of a checkpoint.

    what: a description of the call, by which its recomputation is recognized.
    found: the tensors, in whatever form the caller stores them; None until it has stored them in the first run.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: Any = None


class _CheckpointRun:
    """One run of a checkpoint's function, the first or one that `recomputes`: a context that may be entered again."""

    def __init__(self, of: _Checkpoint, recomputes: bool) -> None:
        self.of, self.recomputes = of, recomputes
        self._calls = 0

    def __enter__(self) -> None:
        self._calls = 0
        _THREAD.runs.append(self)

    def __exit__(self, *exception: object) -> None:
        _THREAD.runs.remove(self)

    def next_kept(self) -> KeptOutputs | KeptTensors | None:
        """Return the kept outputs or tensors of the next call; None if it keeps nothing."""
        self._calls += 1
        if self._calls > len(self.of.of_calls):
            raise RuntimeError(
                f"a checkpoint makes call {self._calls} to other ranks again, but made {len(self.of.of_calls)} the "
                "first time: layers must make the same calls each time"
            )
        return self.of.of_calls[self._calls - 1]


def unseen_by_selective_checkpoints() -> AbstractContextManager[object]:
    """Return a context that hides operations from all dispatch modes if one of them is a selective checkpoint's.

    Otherwise the context does nothing. A selective checkpoint notes every operation of the forward pass, keeps what
    its policy says, and expects the same operations again when the layer is recomputed. A ring makes other ones the
    second time: its buffers may be there already, and ranks compare their calls only now and then. It also sums up
    into tensors that a kernel returned, which a policy may have kept. So attention is recomputed as a whole, or not
    at all. The modes are in `torch/utils/checkpoint.py`.
    """
    if not torch._C._len_torch_dispatch_stack():  # a quick check, made at every call
        return nullcontext()
    if not any(isinstance(mode, _MODES) for mode in _get_current_dispatch_mode_stack()):
        return nullcontext()
    hidden: AbstractContextManager[object] = _disable_current_modes()
    return hidden


class KeptCalls(_Checkpoint):
    """The kept outputs of the attention calls of a function that an autograd function runs in both of its passes.

    Between the two runs the autograd function saves these outputs like other tensors:

        with kept.first_run():
            out = function(x)
        ctx.save_for_backward(x, *kept.release())
        ...
        x, *saved = ctx.saved_tensors
        kept.restore(saved)
        with torch.enable_grad(), kept.second_run():
            out = function(x)
    """

    def first_run(self) -> _CheckpointRun:
        """Return the context for the first run of the function, which keeps the outputs of its attention calls."""
        return _CheckpointRun(self, False)

    def second_run(self) -> _CheckpointRun:
        """Return the context for the second run of the function, whose attention calls return their kept outputs."""
        return _CheckpointRun(self, True)

    def release(self) -> list[Tensor]:
        """Return the kept outputs of all attention calls, to be saved elsewhere, and drop them here."""
        return [x for kept in self.of_calls if isinstance(kept, KeptOutputs) for x in kept.release()]

    def restore(self, tensors: list[Tensor]) -> None:
        """Take back the outputs that `release` returned, and remove them from the front of `tensors`."""
        for kept in self.of_calls:
            if isinstance(kept, KeptOutputs):
                kept.restore(tensors.pop(0), tensors.pop(0))


def next_kept_outputs(strategy: Strategy, inputs: Inputs) -> KeptOutputs | None:
    """Return the `KeptOutputs` of the next attention call in a checkpoint, to fill or, if it is recomputed, to read.

    None if nothing is kept, in inference mode, and outside both checkpoints and `KeptCalls`. Checkpoints keep the
    outputs at the end of the sequence, the share `strategy.kept_share` of its tokens; a selective checkpoint keeps
    all if its policy, asked with q, k and v of `inputs`, saves attention.

    Raises RuntimeError if a recomputation makes other calls than the first run.
    """
    runs = _THREAD.runs
    if not runs or torch.is_inference_mode_enabled():  # in which nothing is computed again
        return None
    inner = next((run for run in reversed(runs) if run.recomputes), None)
    kept = None if inner is None else inner.next_kept()
    if isinstance(kept, KeptTensors):
        raise RuntimeError(_OTHER_CALLS)
    first_runs = [run.of for run in runs if not run.recomputes]
    checkpoints = [record for record in first_runs if not isinstance(record, KeptCalls)]
    if kept is None and any(record.saves_attention(inputs) for record in checkpoints):
        kept = KeptOutputs(1.0, host_memory(inputs.q.device))
    elif kept is None and checkpoints and strategy.kept_share:
        kept = KeptOutputs(strategy.kept_share, host_memory(inputs.q.device))
    for record in checkpoints:
        record.of_calls.append(kept)
    if first_runs and isinstance(first_runs[-1], KeptCalls):
        kept = kept or KeptOutputs(0.0)
        kept.also = KeptOutputs(1.0)
        first_runs[-1].of_calls.append(kept.also)
    return kept


def next_kept_tensors(strategy: Strategy, what: str) -> KeptTensors | None:
    """Return the `KeptTensors` of a call other than attention in a checkpoint, to fill or, if recomputed, to read.

    None if `strategy.kept_share` is 0, in inference mode, and outside checkpoints.

    what: a description of the call. Raises RuntimeError if a recomputation makes another call than the first run.
    """
    runs = _THREAD.runs
    if not runs or torch.is_inference_mode_enabled():  # in which nothing is computed again
        return None
    inner = next((run for run in reversed(runs) if run.recomputes), None)
    kept = None if inner is None else inner.next_kept()
    if isinstance(kept, KeptOutputs) or (kept is not None and kept.what != what):
        raise RuntimeError(_OTHER_CALLS)
    first_runs = [run.of for run in runs if not run.recomputes]
    if kept is None and first_runs and strategy.kept_share:
        kept = KeptTensors(what)
    for record in first_runs:
        record.of_calls.append(kept)
    return kept


class _FollowedFunction:
    """A function that a checkpoint runs; in later runs attention returns the outputs of its first run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._checkpoint, self._ran = function, _Checkpoint(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recomputes, self._ran = self._ran, True
        with _CheckpointRun(self._checkpoint, recomputes):
            return self._function(*args, **kwargs)

    def forget(self) -> None:
        """Let go of kept outputs: a loss may outlive its step, and with it this function."""
        self._checkpoint.of_calls.clear()


def follow_torch(needed: bool = False) -> None:
    """Patch PyTorch's checkpoints, reentrant or not, to keep attention and offload inputs; harmless when repeated.

    How much is kept, and whether inputs are offloaded, is the strategy's choice. Raises ValueError if `needed`, and
    checkpoints of this release of PyTorch are made in a way that the patches do not reach.
    """
    follow_checkpoint_class(checkpoint.CheckpointFunction)
    park_inputs_of_frames()
    _follow_not_reentrant()
    if needed and not are_followed():
        raise ValueError(
            f"keep_attention and offload are not supported with torch {torch.__version__}, whose checkpoints are "
            "made in a way that is not known here: nothing would be kept; leave both out, or use torch 2.11 to 2.15"
        )


def attention_can_be_kept() -> bool:
    """Return whether checkpoints of this release of PyTorch can keep attention, after patching them."""
    follow_torch()
    return are_followed()


@functools.cache
def are_followed() -> bool:
    """Return whether checkpoints that are not reentrant are followed: PyTorch may give their parts other names."""
    before, inside = len(_THREAD.runs), list[int]()

    def function(x: Tensor) -> Tensor:
        inside.append(len(_THREAD.runs))
        return x.exp()

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), requires_grad=True, device="cpu")
        checkpoint.checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return inside == [before + 1]


def _follow_not_reentrant() -> None:
    """Follow PyTorch's checkpoints that are not reentrant, where their contexts are made."""
    name = next(name for name in _NON_REENTRANT if hasattr(checkpoint, name))
    original = getattr(checkpoint, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def followed(fn: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        if options["debug"] or checkpoint._is_compiling(fn, args, kwargs):  # type: ignore[no-untyped-call]
            return original(fn, args, kwargs, **options)
        respects = options.get("respect_saved_tensors_hooks")
        options["context_fn"] = functools.partial(_with_runs, options["context_fn"], respects)
        return original(fn, args, kwargs, **options)

    @functools.wraps(original)
    def followed_before(*args: Any, **kwargs: Any) -> Any:
        if args[_DEBUG] or checkpoint._is_compiling(args[0], args, kwargs):  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)
        context_fn = functools.partial(_with_runs, args[_CONTEXT_FN], None)
        return original(*args[:_CONTEXT_FN], context_fn, *args[_CONTEXT_FN + 1 :], **kwargs)

    wrapper = followed if name == _NON_REENTRANT[0] else followed_before
    setattr(wrapper, _MARK, True)
    setattr(checkpoint, name, wrapper)


def follow_checkpoint_class(kind: Any) -> None:
    """Patch a checkpoint's autograd function to keep attention and offload inputs; harmless when repeated.

    kind: a class such as Megatron's `CheckpointFunction`, whose `forward(ctx, run_function, ...)` runs the function;
    its `forward`, `backward` and `apply` are replaced, and return the results of the originals.
    """
    original, original_backward = kind.forward, kind.backward
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        ctx.burst_followed = _FollowedFunction(run_function)
        return original(ctx, ctx.burst_followed, *args)

    @functools.wraps(original_backward)
    def backward(ctx: Any, *grads: Any) -> Any:
        input_grads = original_backward(ctx, *grads)
        followed = getattr(ctx, "burst_followed", None)  # None if the first ring was made after that forward pass
        if followed is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            followed.forget()
        return input_grads

    setattr(forward, _MARK, True)
    kind.forward, kind.backward = staticmethod(forward), staticmethod(backward)
    park_inputs_of(kind)


def follow_checkpoint_function(module: ModuleType, name: str) -> None:
    """Patch a checkpoint that is a function, `module.name(function, ...)`, to keep attention; harmless when repeated.

    The function that takes its place calls the original, and returns its result.
    """
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_FollowedFunction(function), *args, **kwargs)

    setattr(checkpointed, _MARK, True)
    setattr(module, name, checkpointed)


def _with_runs(
    context_fn: Callable[[], Any], respects: bool | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpoint's two runs; the second has the outputs of attention of the first.

    `respects` is `respect_saved_tensors_hooks` of torch 2.14, which goes to a selective checkpoint's own context.
    """
    first, again = context_fn()
    if hasattr(first, "respect_saved_tensors_hooks"):
        first.respect_saved_tensors_hooks = respects
    kept = _Checkpoint(getattr(first, "policy_fn", None))
    return _ContextPair(first, _CheckpointRun(kept, False)), _ContextPair(again, _CheckpointRun(kept, True))


class _ContextPair:
    """Two contexts as one, which may be entered again, as each backward pass through a retained graph does."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)
