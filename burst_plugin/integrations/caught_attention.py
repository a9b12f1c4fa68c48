"""PyTorch's `scaled_dot_product_attention` inside a module's forward, computed on the ring instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from burst_plugin.attention import burst_attention
from burst_plugin.context import ContextParallel
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Full, Mask, key_padding

_PADDING = WeakTensorKeyDictionary()  # masks by the tensors that they were read from, which layers share


class CaughtAttention(TorchFunctionMode):
    """A mode of PyTorch that computes the one `scaled_dot_product_attention` in a module's forward on the ring.

    Other functions run as they are. A forward without attention, or with a second one, raises ValueError, since that
    would see this rank's tokens only; so do dropout, `is_causal` and masks other than key padding.

    name: the module's name in errors.
    cp: the ring.
    tokens: returns the sequence that the ring attends over, in the forward that is going on.
    """

    def __init__(self, name: str, cp: ContextParallel, tokens: Callable[[], Tokens]) -> None:
        super().__init__()
        self.name, self.cp, self.tokens, self._count = name, cp, tokens, 0

    def watch(self, module: torch.nn.Module) -> None:
        """Register hooks on `module` that switch this mode on in each of its forwards, and off afterwards."""
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        self._count = 0
        self.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not self._count:
            raise ValueError(
                f"{self.name} has attention that is not PyTorch's scaled_dot_product_attention, and so not on the "
                "ring; use the backend native: set_attention_backend('native')"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run every function of PyTorch but attention as it is."""
        attends = func is scaled_dot_product_attention
        return (self._attend if attends else func)(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute attention of [batch, heads, tokens, head dim]; grouped heads need no option on the ring."""
        self._count += 1
        if self._count > 1 or dropout_p or is_causal:
            wrong = f"dropout_p={dropout_p}, is_causal={is_causal}" if self._count == 1 else "a second attention"
            raise ValueError(f"{self.name} has {wrong}, which is not known on a ring; use diffusers' own processor")
        tokens, kind = self.tokens(), query.device.type
        mask = Full() if attn_mask is None else _key_padding(attn_mask, query.shape[0], tokens.length)
        local = [x.transpose(1, 2) for x in (query, key, value)]
        if torch.is_autocast_enabled(kind):
            local = [x.to(torch.get_autocast_dtype(kind)) for x in local]
        q, k, v = local
        scale = options.get("scale")
        return burst_attention(q, k, v, self.cp, mask=mask, softmax_scale=scale, tokens=tokens).transpose(1, 2)


def _key_padding(attn_mask: Tensor, batch: int, length: int) -> Mask:
    """Return PyTorch's mask, bool [1 or batch, 1, 1, length], as a `Mask`. Raise ValueError for any other."""
    if attn_mask.dtype != torch.bool or attn_mask.ndim != 4 or tuple(attn_mask.shape[1:]) != (1, 1, length):
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} of {attn_mask.dtype} is not known on a ring; expected the padding of "
            f"all {length} keys, bool [batch, 1, 1, {length}]"
        )
    if attn_mask not in _PADDING:
        _PADDING[attn_mask] = key_padding(attn_mask[:, 0, 0].expand(batch, -1))
    mask: Mask = _PADDING[attn_mask]
    return mask
