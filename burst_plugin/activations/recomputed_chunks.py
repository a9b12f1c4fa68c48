"""Computing chunks again in a backward pass: the surroundings of the forward pass, and sums of gradients.

The gradient of a weight in bfloat16 that is rounded once per chunk, and then summed, is less exact than one that is
rounded once. So the gradient that `F.linear` gives a weight is added to the sum before it is rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import get_device_states, set_device_states

from burst_plugin.activations.snapshot import Snapshot

linear = torch._C._nn.linear  # `F.linear` itself, which a framework may have replaced
_ROWS_AT_ONCE = 8192  # of a weight

GradientSum = Callable[[], Tensor]  # returns the sum of gradients so far, to be added to


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for computing and adding up numbers of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def trained_among(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that need gradients, each once: one that is there twice would get its gradient twice."""
    return list({id(each): each for each in parameters if each.requires_grad}.values())


def gradients_of(output: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of `inputs` from the gradient of `output`, None where an input is not used.

    Autocast is off meanwhile, as in any backward pass: code that computes in float32 would get gradients in 16 bits.
    """
    with torch.autocast(output.device.type, enabled=False):
        return list(torch.autograd.grad(output, inputs, grad, allow_unused=True))


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a forward pass, for running it again: autocast, random numbers, and all that it read.

    device: the type of the device, such as "cuda". autocast_dtype: None if autocast was off.
    random_state: of the CPU's generator. of_devices: the numbers of devices, and the states of their generators.
    read: a snapshot of the tensors and modules that it read.
    """

    device: str
    autocast_dtype: torch.dtype | None
    random_state: Tensor
    of_devices: tuple[list[int], list[Tensor]]
    read: Snapshot

    @classmethod
    def of(cls, x: Tensor, read: Snapshot) -> Surroundings:
        """Return the surroundings of a forward pass on the tensor `x`, taken before it runs.

        read: a snapshot of the tensors and modules that it reads.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        devices, states = get_device_states(x)
        return cls(device, dtype, torch.get_rng_state(), (list(devices), list(states)), read)

    def autocast(self) -> torch.autocast:
        """Return a context of the forward pass's autocast."""
        return torch.autocast(self.device, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the `with` block under the forward pass's autocast and random state; restore the generators after it.

        Raises RuntimeError if a tensor or module that the forward pass read has changed since.
        """
        self.read.check()
        devices, states = self.of_devices
        with torch.random.fork_rng(devices, device_type=self.device if devices else "cuda"), self.autocast():
            torch.set_rng_state(self.random_state)
            if devices:
                set_device_states(devices, states, device_type=self.device)
            yield


def adds_nothing_itself(parameter: Tensor) -> bool:
    """Return False, for any parameter: gradients are left to autograd. The default of `adds_itself`."""
    return False


class GradientSums:
    """The gradients of parameters, added up over chunks in float32 and rounded once.

    parameters: the tensors that get a gradient. Gradients are passed in and returned in this order.
    adds_itself: takes a parameter, and returns whether the differentiated function adds its gradient up in a buffer
        of its own; the gradient that autograd gets is then meaningless, and is passed on unchanged.
    """

    def __init__(
        self, parameters: Sequence[Tensor], adds_itself: Callable[[Tensor], bool] = adds_nothing_itself
    ) -> None:
        self._parameters, self._adds_itself = parameters, adds_itself
        self._sums: dict[int, Tensor] = {}  # by parameter; in the form of the parameter

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Switch off the hooks of parameters in the `with` block: they get the sum later, not each chunk's part.

        The dictionaries of hooks are emptied, and not replaced: autograd keeps the dictionaries of computed tensors.
        """
        emptied = [(hooks, dict(hooks)) for each in self._parameters if (hooks := each._backward_hooks)]
        try:
            for hooks, _ in emptied:
                hooks.clear()
            yield
        finally:
            for hooks, content in emptied:
                hooks.update(content)

    def of_linears(self) -> AbstractContextManager[object]:
        """Return a context that has `F.linear` add its parameters' gradients to the sums before rounding them.

        Autograd gets no gradient for these parameters then. Under autocast `F.linear` stays as it is.
        """
        return _Linears(self, {id(each) for each in self._parameters})

    def add(self, parts: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients to the sums: one for each parameter, or None for a parameter without one."""
        for parameter, part in zip(self._parameters, parts, strict=True):
            if part is None:
                continue
            if self._adds_itself(parameter):
                self._sums[id(parameter)] = part
            else:
                self.sum_of(parameter).add_(part)

    def sum_of(self, parameter: Tensor) -> Tensor:
        """Return the sum of a parameter's gradients so far, zeros at first, for callers to add to in place."""
        if id(parameter) not in self._sums:
            self._sums[id(parameter)] = torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
        return self._sums[id(parameter)]

    def cast(self) -> list[Tensor | None]:
        """Return the sums in the types of the parameters, and forget them; None for parameters without gradients."""
        sums = [(parameter, self._sums.pop(id(parameter), None)) for parameter in self._parameters]
        for parameter, total in sums:
            if total is None:
                _skip_hooks_without_gradient(parameter)
        return [None if total is None else total.to(parameter.dtype) for parameter, total in sums]

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """Return the sums times a scalar `factor`, in the parameters' types; None for those without gradients."""
        totals: list[Tensor | None] = []
        for parameter in self._parameters:
            total = self._sums.get(id(parameter))
            if total is None:
                _skip_hooks_without_gradient(parameter)
            totals.append(None if total is None else torch.mul(total, factor, out=torch.empty_like(parameter)))
        return totals


class _Arrival:
    """A hook of a parameter that notes whether the last backward pass had a gradient for it."""

    def __init__(self) -> None:
        self.has_gradient = False

    def __call__(self, grad: Tensor | None) -> None:
        self.has_gradient = grad is not None


class _Skipping:
    """A hook of a parameter that is called with gradients, or with the parameter after the `arrival` of one."""

    def __init__(self, hook: Callable[[Tensor], Any], arrival: _Arrival | None) -> None:
        self.hook, self.arrival = hook, arrival

    def __call__(self, x: Tensor | None) -> Any:
        if x is None or (self.arrival is not None and not self.arrival.has_gradient):
            return None
        return self.hook(x)


def _skip_hooks_without_gradient(parameter: Tensor) -> None:
    """Have the hooks of a parameter skip backward passes without a gradient for it.

    Autograd calls none for a parameter that is not used. One that is listed is an input of the chunks' function, used
    or not: its hooks would get None, and hooks of accumulated gradients, such as ZeRO's, would run once more.
    """
    if not parameter.is_leaf or not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return
    before, after = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}
    arrival = next((hook for hook in before.values() if isinstance(hook, _Arrival)), None)
    if arrival is None:
        arrival = _Arrival()
        parameter.register_hook(arrival)  # type: ignore[no-untyped-call]
    for hooks, needed in ((before, None), (after, arrival)):
        for key, hook in list(hooks.items()):
            if not isinstance(hook, (_Arrival, _Skipping)):
                hooks[key] = _Skipping(hook, needed)


class _Linears(TorchFunctionMode):
    """Replaces `F.linear` of weights in `of` by a function that adds up their gradients itself."""

    def __init__(self, sums: GradientSums, of: set[int]) -> None:
        super().__init__()
        self._sums, self._of = sums, of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not linear or torch.is_autocast_enabled((args or (kwargs["input"],))[0].device.type):
            return func(*args, **kwargs)
        x, weight, bias = _linear_arguments(*args, **kwargs)
        if id(weight) not in self._of and id(bias) not in self._of:
            return func(*args, **kwargs)
        return summed_linear(x, weight, bias, weight_sum=self._sum_of(weight), bias_sum=self._sum_of(bias))

    def _sum_of(self, parameter: Any) -> GradientSum | None:
        return partial(self._sums.sum_of, parameter) if id(parameter) in self._of else None


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
    return input, weight, bias


def summed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    x_sum: GradientSum | None = None,
    weight_sum: GradientSum | None = None,
    bias_sum: GradientSum | None = None,
) -> Tensor:
    """Return `F.linear(x, weight, bias)`; its backward pass adds gradients to the given sums before rounding them.

    x_sum, weight_sum, bias_sum: functions that return the tensor to which the gradient of x, weight or bias is added:
    dense, of the same shape, and in at least float32. Autograd gets no gradient for a tensor that has such a sum, and
    the usual gradient where the sum is None.
    """
    out: Tensor = _Linear.apply(x, weight, bias, x_sum, weight_sum, bias_sum)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """`F.linear` that adds gradients to sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *sums: GradientSum | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        y: Tensor = linear(x, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_rows, rows = grad.flatten(0, -2), x.flatten(0, -2)
        x_sum, weight_sum, bias_sum = ctx.sums
        grads: list[Tensor | None] = [None] * 6
        if x_sum is not None:
            add_product(x_sum().view(-1, x.shape[-1]), of_rows, weight)
        elif ctx.needs_input_grad[0]:
            grads[0] = grad @ weight
        if weight_sum is not None:
            add_product(weight_sum(), of_rows.t(), rows)
        elif ctx.needs_input_grad[1]:
            grads[1] = of_rows.t() @ rows
        if bias_sum is not None:
            total = bias_sum()
            total += of_rows.sum(0, dtype=total.dtype)
        elif ctx.needs_input_grad[2]:
            grads[2] = of_rows.sum(0)
        return tuple(grads)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of `a` [M, K] and `b` [K, N] to `total` [M, N] in place, computed in the type of `total`."""
    if not total.is_cuda or a.dtype != b.dtype or a.dtype == total.dtype:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
        return
    for start in range(0, len(total), _ROWS_AT_ONCE):  # the product of all would be as large as the sum
        rows = slice(start, start + _ROWS_AT_ONCE)
        part = total[rows]
        part += torch.mm(a[rows], b, out_dtype=total.dtype)  # not `total[rows] +=`, which copies the sum onto itself


def check_all_are_listed(result: Tensor, inputs: Sequence[Tensor], what: str, advice: str) -> None:
    """Raise ValueError if a result depends on a trained tensor that is not among the `inputs`, which get gradients.

    what: names the computation, such as "an MLP in chunks". advice: what to write instead. Both are for the message.
    """
    leaves = {id(x) for x in inputs}
    listed = {(x.grad_fn, x.output_nr) for x in inputs if x.grad_fn is not None}
    seen: set[Any] = set()
    edges: list[tuple[Any, int]] = [(result.grad_fn, result.output_nr)]
    while edges:
        edge = edges.pop()
        node = edge[0]
        if node is None or node in seen or edge in listed:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise ValueError(
                f"{what} uses a trained tensor {list(leaf.shape)} that is not among its parameters and would get no "
                f"gradient; {advice}; under FSDP, wrap with use_orig_params=True, or use fully_shard"
            )
        edges += node.next_functions


def is_unit(function: object) -> bool:
    """Return whether a function is a unit of `fully_shard`, a module that gathers its weights at each call."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes most of a second
    return fsdp is not None and isinstance(function, fsdp.FSDPModule)


def in_one_call(unit: Any, x: Tensor, computed: Callable[[Callable[[Tensor], Tensor], Tensor], Any]) -> Any:
    """Return `computed(forward, x)` of a unit's own `forward`, from inside one call of the unit with `x`.

    In a call for every chunk the weights would not be those that get a gradient, and ranks that have unequal numbers
    of tokens would gather unequally often, and wait for ever.
    """
    own_forward, forward = vars(unit).get("forward"), unit.forward
    unit.forward = partial(computed, forward)
    try:
        return unit(x)
    finally:
        del unit.forward
        if own_forward is not None:
            unit.forward = own_forward
