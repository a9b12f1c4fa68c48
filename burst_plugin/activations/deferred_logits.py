"""Stand-ins for logits if the loss runs in chunks: `DeferredLogits` in the model, `LazyLogits` in its outputs."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from burst_plugin.activations.snapshot import version_of

_INSTEAD = "leave loss_chunk out, for whole logits"
_NAMED = {torch.tanh: "tanh", torch.mul: "__mul__", torch.div: "__truediv__"}  # functions as methods
_OTHERS = (
    *("add", "radd", "sub", "rsub", "pow", "rpow", "matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge"),
    *("setitem", "rtruediv", "floordiv", "mod", "eq", "ne", "and", "or", "invert", "len", "iter"),
)


class DeferredLogits:
    """A stand-in for logits between a model's head and its loss: hidden states, and the steps to take on logits.

    Casts, tanh, products and quotients with one number, and leaving out the last logits of each token can be done to
    some tokens at a time: they are noted as `steps`, which the loss takes chunk by chunk. Anything else is done with
    whole logits, or refused.

    hidden: the input of the head, [..., H].
    refusal: the beginning of the ValueError that is raised where something needs whole logits, and `head` is None.
    weight: the weight of the head, if the head got it as an argument; else None.
    steps: functions of logits, in the order in which the model applies them.
    head: the function from hidden states to the head's output; None where whole logits must not be made.
    width: how many logits each token has after the steps; None if that is not known.
    """

    def __init__(
        self,
        hidden: Tensor,
        refusal: str,
        weight: Tensor | None = None,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
        head: Callable[[Tensor], Tensor] | None = None,
        width: int | None = None,
    ) -> None:
        self.hidden, self.refusal, self.weight, self.steps, self.head = hidden, refusal, weight, steps, head
        self.width = width
        self.made: Tensor | None = None  # whole logits, once something needs them; they may be modified in place

    __hash__ = object.__hash__

    def after(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states to logits, which runs `project` and then the noted steps.

        project: the function from hidden states to the head's output. The returned function does not refer to this
        object, so that the graph of a loss does not keep the hidden states alive.
        """
        steps = self.steps

        def logits(rows: Tensor) -> Tensor:
            output = project(rows)
            for step in steps:
                output = step(output)
            return output

        return logits

    def whole(self) -> Tensor:
        """Return the whole logits, computed at the first call. Raise ValueError if there is no `head` to do so."""
        return self._whole("reading them")

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def shape(self) -> torch.Size:
        if self.width is None or self.made is not None:
            return self._whole("shape").shape
        return torch.Size([*self.hidden.shape[:-1], self.width])

    def tanh(self) -> Any:
        return self._then(torch.tanh)

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._then(lambda x: x.to(*args, **kwargs))

    def contiguous(self) -> Any:
        return self if self.made is None else self.made.contiguous()

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, other)

    def __truediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NAMED and isinstance(args[0], cls) and not kwargs:
            return getattr(args[0], _NAMED[func])(*args[1:])
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda x: x._whole(name) if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        if self.made is None and self.width is not None and isinstance(index, tuple) and len(index) == 2:
            dots, first = index
            if dots is ... and isinstance(first, slice) and first.start is None and first.step is None:
                return self._then(lambda x: x[..., first], len(range(self.width)[first]))
        return self._whole("indexing")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole(name), name)

    def _with(self, operation: Callable[[Any, Any], Any], value: Any) -> Any:
        """Note a step with a number, or with an untrained tensor of one element."""
        if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
            return operation(self._whole(f"{operation.__name__} of {list(value.shape)}"), value)
        return self._then(lambda x: operation(x, value))

    def _then(self, step: Callable[[Tensor], Tensor], width: int | None = None) -> Any:
        if self.made is not None:
            return step(self.made)
        width = self.width if width is None else width
        return DeferredLogits(self.hidden, self.refusal, self.weight, (*self.steps, step), self.head, width)

    def _whole(self, use: str) -> Tensor:
        if self.head is None:
            raise ValueError(
                f"{self.refusal} does more with its logits than scale or cap them before the loss ({use}); {_INSTEAD}"
            )
        if self.made is None:
            self.made = self.after(self.head)(self.hidden)
        return self.made


def _by_whole(name: str) -> Callable[..., Any]:
    """Return the operator `name` of whole logits."""

    def computed(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self._whole(name), name)(*(x.whole() if isinstance(x, DeferredLogits) else x for x in args))

    return computed


for _name in _OTHERS:
    setattr(DeferredLogits, f"__{_name}__", _by_whole(f"__{_name}__"))


class LazyLogits(Tensor):
    """The logits that a model returns beside a loss computed in chunks: a tensor, computed when its values are read.

    Shape, type and device are known without computing. Values are computed with a graph where gradients are enabled,
    and kept. If they are first read after an optimizer's step, which has changed the weights, that is a RuntimeError.
    Autograd functions take this tensor without reading it, and would lose its gradient: that is a RuntimeError in the
    backward pass, unless their output is not used.
    """

    _compute: Callable[[], Tensor]
    _steps: int
    _is_copy: bool  # made by `clone` in an autograd function, or without gradients
    _version_made: int  # of the values when they were computed
    _hooks: list[Callable[[Tensor], Any]]  # of others, such as DeepSpeed's engine, for the gradient of the values

    @staticmethod
    def of(shape: torch.Size, dtype: torch.dtype, device: torch.device, compute: Callable[[], Tensor]) -> LazyLogits:
        """Return lazy logits of a shape, type and device, whose values `compute` returns when they are read."""
        trains = torch.is_grad_enabled()
        logits: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=dtype, device=device, requires_grad=trains
        )
        logits._compute, logits._steps, logits._hooks, logits._is_copy = compute, optimizer_steps().made, [], False
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                logits.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return logits

    def then(self, step: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> LazyLogits:
        """Return lazy logits whose values are `step` of the values of these logits.

        step: a function of whole logits that keeps their shape.
        dtype: the type of what `step` returns; None if it keeps the type.
        """
        return LazyLogits.of(self.shape, dtype or self.dtype, self.device, lambda: step(self.computed()))

    def copied(self) -> LazyLogits:
        """Return lazy logits whose values are a copy of these: DDP clones all outputs in an autograd function.

        Their gradient, if such a function gives them one, is refused. If the values of these logits change in
        place before the copy is read, reading it raises RuntimeError.
        """
        found = LazyLogits.of(self.shape, self.dtype, self.device, self._copy)
        found._is_copy = True
        return found

    def _copy(self) -> Tensor:
        with torch.no_grad():
            values = self.computed()
            self._check_unchanged(values)
            return values.clone()

    def _check_unchanged(self, values: Tensor) -> None:
        if version_of(values) != self._version_made:
            raise RuntimeError(
                "outputs.logits were changed in place, and are now read with gradients, or by a clone made before: "
                "the loss is computed in chunks, without whole logits. Change a clone made with gradients enabled, "
                'or set memory="off" and no loss_chunk'
            )

    def computed(self) -> Tensor:
        """Return the values as an ordinary tensor, computed at the first call.

        Raises RuntimeError if the first call comes after an optimizer's step, or if values that were computed without
        a graph, and changed in place, are to have one.
        """
        made: tuple[bool, Tensor] | None = vars(self).get("_made")
        is_late = self._steps != optimizer_steps().made
        if made is None and is_late:
            raise RuntimeError(
                "logits are read after an optimizer's step, and were not computed before: the loss is computed in "
                "chunks, without whole logits. Read them before the step, which cpu() does, and clone() without "
                'gradients does not, or set memory="off" and no loss_chunk'
            )
        if made is None or (torch.is_grad_enabled() and not made[0] and not is_late):
            if made is not None:
                self._check_unchanged(made[1])
            made = self._made = torch.is_grad_enabled() or self._is_copy, self._compute()
            self._version_made = version_of(made[1])
            if self._is_copy and self.requires_grad:
                made[1].requires_grad_().register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
            for hook in self._hooks if made[1].requires_grad else ():
                made[1].register_hook(hook)  # type: ignore[no-untyped-call]
        return made[1]

    def _can_wait(self) -> bool:
        """Return whether these logits were made to be trained, are not computed, and are used without gradients."""
        return self.requires_grad and not torch.is_grad_enabled() and "_made" not in vars(self)

    def _note_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook for the gradient of the values, whenever they are computed."""
        self._hooks.append(hook)
        made: tuple[bool, Tensor] | None = vars(self).get("_made")
        if made is not None and made[1].requires_grad:
            handle: RemovableHandle = made[1].register_hook(hook)  # type: ignore[no-untyped-call]
            return handle
        return RemovableHandle(OrderedDict())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.register_hook:
            return args[0]._note_hook(args[1])
        if func is Tensor.detach and not torch.is_grad_enabled():  # as in autograd functions, such as hooks of ZeRO-3
            return args[0].then(_unchanged)
        if func is Tensor.clone and len(args) == 1 and not kwargs and args[0]._can_wait():
            return args[0].copied()
        if func in _LATER and len(args) == 1 and not kwargs:
            return args[0].then(func, _LATER[func])
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
            return args[0].then(lambda x: x.to(args[1]), args[1])
        return func(*_read(args), **_read(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        return func(*_read(args), **_read(kwargs))


def _refuse_gradient(grad: Tensor | None) -> None:
    if grad is None:  # the function's output is not part of the loss
        return
    raise RuntimeError(
        "an autograd function, or a reentrant checkpoint, got outputs.logits, which were not computed: its gradient "
        'would be lost. Set memory="off" and no loss_chunk, or give it outputs.logits.clone()'
    )


class OptimizerSteps:
    """How many steps all optimizers of this process have `made`, and the optimizers that have made them."""

    def __init__(self) -> None:
        self.made = 0
        self._optimizers = WeakSet[torch.optim.Optimizer]()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.made += 1
        self._optimizers.add(optimizer)

    def have_state_of(self, parameter: Tensor) -> bool:
        """Return whether an optimizer that has made a step holds states of a parameter, such as Adam's moments."""
        return any(parameter in each.state for each in self._optimizers)


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Return the count of optimizers' steps, from the first call on."""
    steps = OptimizerSteps()
    register_optimizer_step_post_hook(steps)
    return steps


def _unchanged(x: Tensor) -> Tensor:
    return x


def _read(value: Any) -> Any:
    return tree_map(lambda x: x.computed() if isinstance(x, LazyLogits) else x, value)


_ABOUT = {  # operations that read no values
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse")
    ),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "is_meta", "is_cpu", "grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.element_size),
}
_LATER = {
    Tensor.detach: None,
    Tensor.contiguous: None,
    Tensor.float: torch.float32,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
}
