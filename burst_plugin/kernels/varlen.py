"""Packed sequences of any lengths: looped over, or batched in one call of a library that proves right in a trial.

    q    0 0 0 0 1 1 2 2 2 2 2       lengths.q = (4, 2, 5)     q_ends = [0, 4, 6, 11]
    k    0 0 1 1 1 1 2 2 2           lengths.k = (2, 4, 3)     k_ends = [0, 2, 6, 9]

With more than one batch row all sequences of the first one come first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_plugin.kernels.protocol import Grads, How, Kernel, Lengths, Queries
from burst_plugin.kernels.trial import RESULTS, TOLERANCE, difference
from burst_plugin.scores import Scores
from burst_plugin.types import ANTICAUSAL, CAUSAL, FULL

DQ_ROWS = 128  # flash-attention rounds the rows of every sequence up to multiples of at most this where it sums dq

_LOG = logging.getLogger(__name__)


class VarlenKernel(Kernel, Protocol):
    """A kernel that can also compute several packed sequences in one call."""

    def forward_batched(self, q: Tensor, k: Tensor, v: Tensor, how: How, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of the packed sequences `lengths`, in one call."""
        ...

    def backward_batched(self, queries: Queries, k: Tensor, v: Tensor, how: How, lengths: Lengths) -> Grads:
        """Return the contributions to dq, dk and dv of the packed sequences `lengths`, in one call."""
        ...


def lengths_of(q: tuple[int, ...], k: tuple[int, ...], device: torch.device) -> Lengths:
    """Return the `Lengths` of sequences with these numbers of queries and keys, their bounds on `device`.

    Nothing waits for the device.
    """
    ends = (torch.tensor([0, *accumulate(each)], dtype=torch.int32, device="cpu") for each in (q, k))
    return Lengths(q, k, *(sent(each, device) for each in ends))


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`, without waiting for the copy; return the copy."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def forward_looped(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of packed sequences, with one call of `kernel` for each.

    The sequences are `how.lengths`.
    """
    batch, alone = q.shape[0], how._replace(lengths=None)
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    found = [kernel.forward(q[:, rows], k[:, keys], v[:, keys], alone) for rows, keys in _sequences(how)]
    out, lse = torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 2)
    return in_rows(out[0], batch), in_rows_of_heads(lse[0], batch)


def backward_looped(kernel: Kernel, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
    """Return the contributions to dq, dk and dv of packed sequences, with one call of `kernel` for each.

    The sequences are `how.lengths`.
    """
    batch, alone = k.shape[0], how._replace(lengths=None)
    q, dout, out, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (*queries[:3], k, v))
    lse = queries.lse.transpose(0, 1).flatten(1).unsqueeze(0)
    sequence_grads = [
        kernel.backward(
            Queries(q[:, rows], dout[:, rows], out[:, rows], lse[:, :, rows]), k[:, keys], v[:, keys], alone
        )
        for rows, keys in _sequences(how)
    ]
    grads_by_input = zip(*(grads[:3] for grads in sequence_grads), strict=True)
    dq, dk, dv = (in_rows(torch.cat(grads, 1)[0], batch) for grads in grads_by_input)
    return Grads(dq, dk, dv)


def in_rows(x: Tensor, batch: int) -> Tensor:
    """Reshape x [B * T, H, D] to [B, T, H, D]."""
    return x.reshape(batch, -1, *x.shape[1:])


def in_rows_of_heads(x: Tensor, batch: int) -> Tensor:
    """Reshape x [H, B * T] to [B, H, T]."""
    return x.reshape(x.shape[0], batch, -1).transpose(0, 1)


def _sequences(how: How) -> Iterator[tuple[slice, slice]]:
    assert how.lengths is not None, "only packed sequences are looped over"
    ends = (pairwise([0, *accumulate(each)]) for each in (how.lengths.q, how.lengths.k))
    for rows, keys in zip(*ends, strict=True):
        yield slice(*rows), slice(*keys)


class Trial(NamedTuple):
    """The case of a trial that compares one call of a kernel on several packed sequences with a call for each.

    device, dtype: the device and the type of all tensors.
    qk_dim, v_dim: the head dims of q and k, and of v.
    softcap: the cap of scores; None is none.
    deterministic: whether two runs have to give the same bits.
    anticausal: whether sequences are anticausal, in place of full and causal ones.
    """

    device: torch.device
    dtype: torch.dtype
    qk_dim: int
    v_dim: int
    softcap: float | None
    deterministic: bool
    anticausal: bool = False  # in place of full and causal sequences


@cache
def is_right(kernel: VarlenKernel, trial: Trial) -> bool:
    """Return whether a batched call of a kernel on packed sequences gives the results of a call for each sequence.

    If not, a warning is logged, once. Raises torch.OutOfMemoryError.
    """
    try:
        wrong = [name for name, error in _errors(kernel, trial).items() if not error < TOLERANCE]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the library raises
        problem = f"{type(error).__name__}: {error}"
    else:
        if not wrong:
            return True
        problem = f"{', '.join(wrong)} differ from what single calls give"
    _LOG.warning(
        "%s works on packed documents one after another, which is slower: several in one call fail (%s)",
        kernel.name,
        problem,
    )
    return False


def _errors(kernel: VarlenKernel, trial: Trial) -> dict[str, float]:
    """Return, by result, the largest relative difference between batched and looped calls, in each band."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(rows: int, heads: int, dim: int) -> Tensor:
        drawn = torch.randn(1, rows, heads, dim, generator=generator, device="cpu", dtype=torch.float32)
        return drawn.to(trial.device, trial.dtype)

    errors: dict[str, float] = {}
    squares = (5, 130, 64)
    usual = ((CAUSAL, squares), (FULL, (70, 1, 200)))
    for band, k_lengths in ((ANTICAUSAL, squares),) if trial.anticausal else usual:
        lengths = lengths_of(squares, k_lengths, trial.device)
        scores = Scores(scale=trial.qk_dim**-0.5, softcap=trial.softcap)
        how = How(band, scores, deterministic=trial.deterministic, lengths=lengths)
        q, dout = (draw(sum(lengths.q), 4, dim) for dim in (trial.qk_dim, trial.v_dim))
        k, v = (draw(sum(k_lengths), 2, dim) for dim in (trial.qk_dim, trial.v_dim))
        out_lse = forward_looped(kernel, q, k, v, how)
        queries = Queries(q, dout, *out_lse)
        looped = (*out_lse, *backward_looped(kernel, queries, k, v, how)[:3])
        batched_out_lse = kernel.forward_batched(q, k, v, how, lengths)
        batched = (*batched_out_lse, *kernel.backward_batched(queries, k, v, how, lengths)[:3])
        for name, one, other in zip(RESULTS, batched, looped, strict=True):
            errors[name] = max(errors.get(name, 0.0), difference(one, other))
    return errors
