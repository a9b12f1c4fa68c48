"""Attention modules of transformers that work on a few heads at a time: which can, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.chunked_heads import Linear, chunked_heads
from burst_plugin.activations.replaced_forward import ReplacedForward, in_place_of
from burst_plugin.huggingface.attention import is_on_ring
from burst_plugin.huggingface.recurrent import is_mixer
from burst_plugin.huggingface.text_only import text_modules

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "dense")
_GATED = re.compile(r"Qwen3(Next|_5\w*)Attention")  # q_proj: of each head queries, then a gate
_BY_HEAD = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")  # norms of one head, whose weights all heads share
_SINKS = "sinks"
_CACHES = ("cache", "past_key_values", "past_key_value")
_DORA, _IA3 = "lora_magnitude_vector", "ia3_l"
# The parts of PEFT's linear layers that have parameters, of LoRA, DoRA and IA3.
_ADAPTERS = ("base_layer", "lora_A", "lora_B", _DORA, _IA3)


@dataclass(frozen=True)
class _Heads:
    """The heads of one attention module."""

    queries: int
    keys: int
    dim: int

    @property
    def group(self) -> int:
        """Return how many query heads share a key head."""
        return self.queries // self.keys


def attention_modules(model: torch.nn.Module, head_chunk: int) -> list[torch.nn.Module]:
    """Return the attention modules of `model`, which can all work on `head_chunk` query heads at a time.

    Raises ValueError if one cannot, or the model has no attention modules.
    """
    modules = [
        module
        for module in text_modules(model)
        if (type(module).__name__.endswith("Attention") or hasattr(module, "q_proj")) and not is_mixer(module)
    ]
    reasons = {f"{type(module).__name__} {reason}" for module in modules if (reason := _refused(module, head_chunk))}
    if not modules:
        reasons = {f"{type(model).__name__} has no attention with {', '.join(_PROJECTIONS)} and {_OUTPUTS[0]}"}
    if reasons:
        raise ValueError(
            f"head_chunk={head_chunk} is not possible here: {'; '.join(sorted(reasons))}; use head_chunk=0, or call "
            "burst_plugin.activations.chunked_heads.chunked_heads in the model"
        )
    return modules


def _refused(module: Any, head_chunk: int) -> str | None:
    """Return why a module cannot work on so many heads at a time, or None if it can."""
    children = dict(module.named_children())
    output = _output_of(module)
    missing = [name for name in (*_PROJECTIONS, output) if name not in children]
    if missing:
        return f"has no {' and no '.join(missing)}"
    for name in _PROJECTIONS:
        if not _rows_of(children[name]):
            kind = _described(children[name])
            return f"has a {name} that is neither an nn.Linear nor one with LoRA, DoRA or IA3, but a {kind}"
    dim = getattr(module, "head_dim", 0)
    widths = [int(getattr(module, name).out_features) for name in _PROJECTIONS]
    outputs = int(getattr(module, output).in_features)
    if not dim or any(width % dim for width in (*widths, outputs)) or widths[1] != widths[2]:
        return f"does not project to heads of one size, head_dim={dim}, but to {', '.join(map(str, widths))}"
    if widths[0] != outputs * (2 if _GATED.fullmatch(type(module).__name__) else 1):
        return f"projects queries to {widths[0]} numbers, but its output projection takes {outputs}"
    heads = _heads(module)
    others = [name for name, child in children.items() if not _is_allowed(name, child, dim)]
    others += [name for name, _ in module.named_parameters(recurse=False) if name != _SINKS]
    others += [name for name, _ in module.named_buffers(recurse=False)]
    if others:
        return f"has a {others[0]}, which may need all heads at once"
    if heads.queries % head_chunk or head_chunk % heads.group:
        valid = [n * heads.group for n in range(1, heads.keys + 1) if heads.keys % n == 0]
        return f"has {heads.queries} query heads, {heads.group} for each key head: use one of {valid}"
    return None


def _is_allowed(name: str, child: torch.nn.Module, dim: int) -> bool:
    """Return whether a child of an attention module treats all heads alike."""
    if name in (*_PROJECTIONS, *_OUTPUTS):
        return True
    sizes = [_size(each) for each in child.parameters()]
    is_one_norm = name in _BY_HEAD and not any(True for _ in child.children())  # and not one for each head
    return all(size == dim for size in sizes) if is_one_norm else not sizes


def _size(parameter: Tensor) -> int:
    """Return the number of elements of a parameter, also of one that ZeRO-3 has partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _heads(module: Any) -> _Heads:
    dim = module.head_dim
    outputs = getattr(module, _output_of(module)).in_features
    return _Heads(outputs // dim, module.k_proj.out_features // dim, dim)


def _output_of(module: torch.nn.Module) -> str:
    """Return the name of the projection of outputs."""
    return next((name for name in _OUTPUTS if hasattr(module, name)), _OUTPUTS[0])


def _rows_of(projection: Any) -> list[torch.nn.Linear]:
    """Return the linear layers of a projection that have its output features; none if it has other parts as well."""
    if type(projection) is torch.nn.Linear:
        return [projection]
    parts = {name.partition(".")[0] for name, _ in projection.named_parameters()}
    if "base_layer" not in parts or not parts <= set(_ADAPTERS):
        return []
    layers = [projection.base_layer, *getattr(projection, "lora_B", {}).values()]
    return layers if all(type(each) is torch.nn.Linear for each in layers) else []


def _described(projection: torch.nn.Module) -> str:
    """Return the class of a projection, with the parts that known adapters do not have, for an error message."""
    kind = f"{type(projection).__module__}.{type(projection).__qualname__}"
    parts = {name.partition(".")[0] for name, _ in projection.named_parameters()}
    others = sorted(parts - set(_ADAPTERS)) if _ADAPTERS[0] in parts else []
    return f"{kind} with {', '.join(others)}" if others else kind


class ChunkedAttention(ReplacedForward):
    """A replacement of an attention module's `forward` that computes `chunk` query heads at a time.

    It does so for sharded batches; whole batches go through the `forward` that the module had before.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler may keep what is to be computed again
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own `forward` on `chunk` query heads at a time."""
        module: Any = self.module
        if not is_on_ring(args, kwargs):
            return self.earlier(*args, **kwargs)
        heads, (hidden, *positional), options = _heads(module), args, _without_cache(module, kwargs)
        # Keys and values that a layer leaves to others: it reads none of them, see `_refused`.
        read = [value for name, value in options.items() if name != "shared_kv_states"]
        _refuse_gradients(module, (*positional, *read))
        others: list[Any] = []

        def attend(number: int, x: Tensor, linear: Linear) -> Tensor:
            nonlocal others
            with self._on_heads(heads, number, linear):
                out, *others = self.earlier(x, *positional, **options)
            return self._checked(out, x, heads)

        output = _output_of(module)
        parameters = [each for name, each in module.named_parameters() if not name.startswith(f"{output}.")]
        out = chunked_heads(attend, hidden, parameters, chunks=heads.queries // self.chunk, module=module)
        return (getattr(module, output)(out), *others)

    def _on_heads(self, heads: _Heads, number: int, project: Linear) -> ExitStack:
        """Return a context that leaves the module one chunk of its heads, and no projection of their outputs.

        Its projections are computed by `project`.
        """
        module: Any = self.module
        stack = ExitStack()
        stack.enter_context(in_place_of(module, {_output_of(module): _as_it_is}))
        chunks = heads.queries // self.chunk
        for name in _PROJECTIONS:
            size = getattr(module, name).out_features // chunks
            rows = slice(number * size, (number + 1) * size)
            scales = [*_scales(getattr(module, name), rows)]
            cut = [owner for owner, _ in scales]  # whose weights are cut to these rows already
            for linear in _rows_of(getattr(module, name)):
                left = slice(None) if any(linear is owner for owner in cut) else rows
                stack.enter_context(in_place_of(linear, {"forward": _projection(linear, left, project)}))
            for owner, values in scales:
                stack.enter_context(in_place_of(owner, values))
        if _SINKS in module._parameters:
            sinks = module.sinks[number * self.chunk : (number + 1) * self.chunk]
            stack.enter_context(in_place_of(module, {_SINKS: sinks}))
        return stack

    def _checked(self, out: Tensor, hidden: Tensor, heads: _Heads) -> Tensor:
        expected = (*hidden.shape[:-1], self.chunk * heads.dim)
        if tuple(out.shape) != expected:
            raise ValueError(
                f"{type(self.module).__name__} returned {list(out.shape)} for a chunk of {self.chunk} heads, "
                f"expected {list(expected)}: it cannot work on a few heads at a time; use head_chunk=0"
            )
        return out


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _projection(linear: torch.nn.Linear, rows: slice, project: Linear) -> Callable[[Tensor], Tensor]:
    """Return the `forward` of some of the output features of a layer."""

    def forward(x: Tensor) -> Tensor:
        return project(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])

    return forward


def _scales(projection: Any, rows: slice) -> Iterator[tuple[torch.nn.Module, dict[str, Any]]]:
    """Yield modules that scale output features of a projection, each with its parameters for the features `rows`.

    DoRA compares its magnitudes with the norms of the weights of the layer below.
    """
    if hasattr(projection, _IA3) and not projection.is_feedforward:
        yield projection, {_IA3: _SomeRows(getattr(projection, _IA3), rows)}
    for dora in getattr(projection, _DORA, {}).values():
        base = projection.base_layer
        if dora.weight.numel() != base.out_features:
            raise ValueError(
                "head_chunk is not supported with DoRA where ZeRO-3 has partitioned its magnitudes; use head_chunk=0"
            )
        yield dora, {"weight": dora.weight[rows]}
        yield base, {name: x[rows] for name, x in base.named_parameters(recurse=False)}


class _SomeRows:
    """Takes the place of a dictionary of parameters, and returns some of their rows."""

    def __init__(self, parameters: Any, rows: slice) -> None:
        self.keys = parameters.keys
        self._parameters, self._rows = parameters, rows

    def __getitem__(self, name: str) -> Tensor:
        rows: Tensor = self._parameters[name][self._rows]
        return rows


def _without_cache(module: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without an empty cache, which would take the chunks for more and more tokens."""
    options = dict(kwargs)
    for name in _CACHES:
        cache = options.get(name)
        if cache is not None and cache.get_seq_length(module.layer_idx) == 0:
            options[name] = None
    return options


def _refuse_gradients(module: torch.nn.Module, values: tuple[Any, ...]) -> None:
    """Raise ValueError if a module is given anything besides hidden states that needs a gradient."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(values)):
        raise ValueError(
            f"{type(module).__name__} with heads in chunks got a tensor besides its hidden states that needs a "
            "gradient, and would get none; use head_chunk=0"
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
