"""What ranks have computed of a turn's tokens, brought together on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin.checks import shown
from burst_plugin.context import ContextParallel
from burst_plugin.inference.turn import Turn
from burst_plugin.ring.agreement import prepared_together


def gathered(cp: ContextParallel, turn: Turn | None, x: Tensor, last: bool) -> Tensor:
    """Return `x` of all ranks; see `KVCache.gather`."""

    def prepared() -> Turn:
        if turn is None:
            raise ValueError("no turn has begun whose tokens could be gathered")
        if not isinstance(x, Tensor) or x.shape[:2] != (len(turn.starts), turn.size):
            expected = f"[{len(turn.starts)}, {turn.size}, ...]"
            raise ValueError(f"gather got {shown(x)}, but this rank's tokens of the turn are {expected}")
        return turn

    def agree(now: Turn | None, problem: str) -> None:
        compared = {"last": bool(last), "sizes": x.shape[2:], "dtype": x.dtype}
        cp.agree({} if now is None else compared, problem, of="tokens that are gathered")

    now, _ = prepared_together(prepared, agree)
    if now.replicated:
        return _last(x, now.counts) if last else _without_padding(x, now)
    if last:
        of_ranks = _of_ranks(cp, _last(x, now.counts))
        return torch.stack([of_ranks[(stop - 1) % now.ranks][row] for row, stop in enumerate(now.stops)])
    return _whole(cp, now, x)


def _whole(cp: ContextParallel, turn: Turn, x: Tensor) -> Tensor:
    """Return all new tokens, of which each rank has some."""
    owns = [turn.own_of(rank) for rank in range(turn.ranks)]
    most = max(max(turn.counts_of(rank)) for rank in range(turn.ranks))
    padded = x.new_zeros(len(x), most, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    whole = x.new_zeros(len(x), max(turn.lengths), *x.shape[2:])
    for theirs, own in zip(_of_ranks(cp, padded), owns, strict=True):
        for row, mine in enumerate(own):
            count = len(range(mine.start, mine.stop, mine.step))
            whole[row, mine] = theirs[row, :count]
    return whole


def _of_ranks(cp: ContextParallel, x: Tensor) -> list[Tensor]:
    """Return a tensor of every rank, all of one shape; collective."""
    found = [torch.empty_like(x) for _ in range(cp.ranks)]
    dist.all_gather(found, x.contiguous(), group=cp.group)
    return found


def _last(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return the last of this rank's tokens of each row, [B, ...]; 0 for rows without any."""
    each = zip(x, counts, strict=True)
    return torch.stack([row[count - 1] if count else row.new_zeros(row.shape[1:]) for row, count in each])


def _without_padding(x: Tensor, turn: Turn) -> Tensor:
    valid = turn.valid.to(x.device).view(*turn.valid.shape, *[1] * (x.dim() - 2))
    return x.where(valid, 0)
