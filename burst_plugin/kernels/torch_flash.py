"""PyTorch's flash-attention kernel for NVIDIA GPUs, a build of flash-attention 2.

`aten::_flash_attention_forward` and `_backward` (aten/src/ATen/native/transformers/cuda/attention.cu and
attention_backward.cu). Without dropout the random state is never read. Determinism is a switch of the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from burst_plugin.kernels.flash import Ask, FlashAttention2
from burst_plugin.kernels.limits import HALVES, Limits
from burst_plugin.kernels.protocol import Case, Lengths, Queries

_Sequences = tuple[Tensor | None, Tensor | None, int, int]  # cum_seq_q, cum_seq_k, max_q, max_k


def activated_library() -> str | None:
    """Return the name of the library activated in place of PyTorch's flash-attention kernel; None if none is.

    Source: `torch.nn.attention.activate_flash_attention_impl`.
    """
    name: str | None = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()  # in newer ones
    return name


class TorchFlashKernel(FlashAttention2):
    """The kernel of PyTorch's build of flash-attention 2: 16-bit types, windows, grouped heads, packed sequences."""

    name = "torch_flash"
    limits = Limits("cuda", HALVES, dims=((256, 256),), capability=((8, 0), (12, 1)))

    def refuse_library(self, case: Case) -> str | None:
        library = activated_library()
        if library is not None:  # in whichever version, and its kernel here would not know
            return f"{library} is activated in its place; torch.nn.attention.restore_flash_attention_impl() ends that"
        built = torch.backends.cuda.is_flash_attention_available()
        return None if built else "this PyTorch was built without flash-attention"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        return self._run(q, k, v, ask, (None, None, q.shape[1], k.shape[1]))

    def call_forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor]:
        return self._run(q, k, v, ask, _sequences(lengths))

    @staticmethod
    def _run(q: Tensor, k: Tensor, v: Tensor, ask: Ask, sequences: _Sequences) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *sequences),
            *(0.0, False, False),  # dropout_p, is_causal, return_debug_mask
            scale=ask.scale,
            window_size_left=ask.left,
            window_size_right=ask.right,
        )
        return out, lse

    def call_backward(self, queries: Queries, k: Tensor, v: Tensor, ask: Ask) -> tuple[Tensor, Tensor, Tensor]:
        return self.run_backward(queries, k, v, ask, (None, None, queries.q.shape[1], k.shape[1]))

    def call_backward_varlen(
        self, queries: Queries, k: Tensor, v: Tensor, ask: Ask, lengths: Lengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.run_backward(queries, k, v, ask, _sequences(lengths))

    @staticmethod
    def run_backward(
        queries: Queries, k: Tensor, v: Tensor, ask: Ask, sequences: _Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv from PyTorch's operator, of one tile or of packed sequences.

        sequences: the last rows of packed sequences of queries and of keys, or None twice; their longest lengths.
        """
        q, dout, out, lse = queries
        state = (
            torch.empty(2, dtype=torch.uint64, device=q.device),
            torch.empty((), dtype=torch.uint64, device=q.device),
        )
        with _deterministic(ask.deterministic):
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                *(dout, q, k, v, out, lse, *sequences),
                *(0.0, False, *state),  # dropout_p, is_causal, rng_state, unused
                scale=ask.scale,
                window_size_left=ask.left,
                window_size_right=ask.right,
            )
        return dq, dk, dv


def _sequences(lengths: Lengths) -> _Sequences:
    return lengths.q_ends, lengths.k_ends, max(lengths.q), max(lengths.k)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Set PyTorch's switch for deterministic algorithms inside the block, if `wanted`.

    Only that switch: `torch.use_deterministic_algorithms` sets inductor's as well, and has new tensors filled.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
