"""Attention to tokens and to entries that are made of windows of tokens, as in DeepSeek V4, over the ranks of a ring.

    entries = Entries(cp, 4, True, mask=Causal(), tokens=tokens, batch=B)     which windows there are
    made = entries.pooled(kv, gate, bias)                                     [B, n, D], on the rank of last tokens
    both = torch.cat([kv_of_tokens, made.unsqueeze(2)], 1)
    out = entries.attend(q, both, SlidingWindow(127), sink=sink)

One call attends to both, in one softmax: entries are further keys, behind the tokens of their rank. A rank that makes
an entry fetches the tokens of its window from the ranks that hold them, and gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import next_kept_tensors, unseen_by_selective_checkpoints
from burst_plugin.attention import burst_attention
from burst_plugin.context import ContextParallel
from burst_plugin.latents import latent_attention, sends_latents
from burst_plugin.recurrent.halo import HaloFunction, HaloPlan
from burst_plugin.recurrent.passes import OfOneRank
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Mask
from burst_plugin.sparse.windows import Sources, Windows

_KNOWN = 8  # batches whose windows are kept
_WHAT = "tokens of windows"


class Entries:
    """The entries of a batch: keys that are each made of a window of tokens; shared by the layers of one kind.

    Entries are on the rank of their window's last token. Each rank has n slots for entries in every batch row; a
    batch row with fewer windows there leaves some unused.

    Args:
        cp: the ring.
        rate: the tokens of a window.
        overlaps: whether an entry is also made of the window before its own; then each token has two series of
            numbers, one for either entry.
        mask: documents and padding, in positions of the whole sequence; None for none.
        tokens: the sequence that rows are taken from.
        batch: the number of batch rows.

    Raises:
        ValueError: for prefix trees, a mask that differs between groups of heads, padding inside a document, or a
            striped layout.
    """

    def __init__(
        self, cp: ContextParallel, rate: int, overlaps: bool, *, mask: Mask | None, tokens: Tokens, batch: int
    ) -> None:
        self._cp, self._batch, self._tokens = cp, batch, tokens
        shards = cp.rank_state.route_table.shards(tokens)
        self.windows = Windows(shards, tokens.length, mask, rate, overlaps)
        self._held = sum(run.length for run in shards[cp.rank])
        self._by_device: dict[torch.device, tuple[Sources, HaloPlan, Tensor]] = {}

    @classmethod
    def known(
        cls, cp: ContextParallel, rate: int, overlaps: bool, *, mask: Mask | None, tokens: Tokens, batch: int
    ) -> Entries:
        """Return the `Entries` for these arguments, made once and shared by the layers of a forward.

        It takes the arguments of `Entries` itself.
        """
        plans: dict[Any, Any] = cp.plans
        known: dict[Any, Entries] = plans.setdefault(cls, {})
        key = (rate, overlaps, mask, tokens, batch)
        if key not in known:
            if len(known) >= _KNOWN:
                known.clear()
            with torch.inference_mode(False):  # training uses them, too
                known[key] = cls(cp, rate, overlaps, mask=mask, tokens=tokens, batch=batch)
        return known[key]

    @property
    def count(self) -> int:
        """Return how many slots for entries all ranks have together in a batch row."""
        return self.windows.slots

    def last_tokens(self, device: torch.device) -> Tensor:
        """Return where the last token of each slot's window is among this rank's tokens, int64 [B, n].

        It is an index into [B, S_local], from 0 in each batch row; -1 for slots that a batch row does not use.
        """
        return self._on(device)[0].last

    def at_last_tokens(self, made: Tensor) -> Tensor:
        """Place entries [B, n, D] of this rank at their windows' last tokens, [B, S_local, D], zeros elsewhere."""
        last = self.last_tokens(made.device)
        places = torch.where(last < 0, self._held, last).unsqueeze(2).expand_as(made)
        everywhere = made.new_zeros((len(made), self._held + 1, made.shape[2])).scatter(1, places, made)
        return everywhere[:, : self._held]

    def pooled(self, kv: Tensor, gate: Tensor, bias: Tensor, tag: object = None) -> Tensor:
        """Return the sum of each window's tokens, weighed by the softmax of their gates; collective, with gradient.

        Args:
            kv, gate: [B, S_local, D]; with overlaps [B, S_local, 2 * D]: the first half is a token's part in the
                entry of the next window, the second half its part in the entry of its own window.
            bias: [rate, D], or [rate, 2 * D]: added to gates by places in the window.
            tag: a name for the call that is the same on every rank.

        Returns:
            [B, n, D] in the type of kv, for this rank's n slots.
        """
        sources, rate = self._on(kv.device)[0], self.windows.rate
        series = self.windows.width // rate
        dim = kv.shape[2] // series
        parts = [(slice(n * rate, (n + 1) * rate), slice(n * dim, (n + 1) * dim)) for n in range(series)]
        of_tokens, gates = (
            torch.cat([x[:, numbers][sources.rows[..., places]] for places, numbers in parts], 2)
            for x in self._with_foreign([kv, gate], tag)
        )
        gates = gates + torch.cat([bias[:, numbers] for _, numbers in parts])
        gates = gates.masked_fill(~sources.exist.unsqueeze(3), -torch.inf)
        weights = gates.softmax(2, dtype=torch.promote_types(gates.dtype, torch.float32)).to(kv.dtype)
        return (of_tokens * weights).sum(2)

    def attend(
        self, q: Tensor, kv: Tensor, mask: Mask, *, starts: Tensor | None = None, window: int = 0, **terms: Any
    ) -> Tensor:
        """Return attention of this rank's queries to the tokens and the entries of all ranks; collective.

        Args:
            q: [B, S_local, Hq, D].
            kv: [B, S_local + n, 1, D], keys that are values as well: of this rank's tokens, then its entries.
            mask: which tokens queries attend to, with documents and padding. They attend to the entries of windows of
                their document that are complete.
            starts: where the windows of selected entries start in the whole sequence, int32 [B, S_local, k], -1 for
                none, as `select_pools` returns them; None for all entries.
            window: how many tokens a query attends to, itself and the tokens before it; needed with `starts`.
            terms: `scores`, `sink` and `tag`, as for `burst_attention`.

        Returns:
            out [B, S_local, Hq, D].

        Raises:
            ValueError, RingError: as `burst_attention`.
        """
        terms |= {
            "mask": self.windows.mask_with(mask, exact=starts is None),
            "tokens": (self._tokens, self.windows.tokens_and_entries),
        }
        if starts is not None:
            terms["selection"] = self._listed(starts, window)
        out: Tensor
        if sends_latents(self._cp):  # so that they travel once
            out = latent_attention(q, kv, kv[..., :0], self._cp, **terms)
        else:
            out = burst_attention(q, kv, kv, self._cp, **terms)
        return out

    def _listed(self, starts: Tensor, window: int) -> Tensor:
        """Return the keys of queries: the tokens of a window, and selected entries; int32 [B, S_local, n]."""
        device, slots = starts.device, self._on(starts.device)[2]
        ends = (starts + self.windows.rate - 1).clamp(min=0).long()
        entries = slots.expand(len(starts), -1).gather(1, ends.flatten(1)).view_as(starts) + self.windows.length
        entries = entries.masked_fill(starts < 0, -1)
        at = self._cp.positions(self._tokens, device=device).to(torch.int32)
        tokens = at.unsqueeze(1) - torch.arange(window, dtype=torch.int32, device=device)
        tokens = tokens.clamp_(min=-1).expand(len(starts), -1, -1)
        return torch.cat([tokens, entries.to(torch.int32)], 2)

    def _with_foreign(self, xs: Sequence[Tensor], tag: object) -> list[Tensor]:
        """Return the rows [T, ...] of each x [B, S_local, ...], followed by the rows that other ranks have sent."""
        passes = OfOneRank(self._cp)
        _, plan, _ = self._on(xs[0].device)

        def signature(_: None) -> Mapping[str, object]:
            return {
                "call": _WHAT,
                "tokens": self._tokens,
                "slots": self.windows.slots,
                "rate": [self.windows.rate, self.windows.width],
                "shapes": [[x.shape[0], *x.shape[2:]] for x in xs],
                "dtype": [x.dtype for x in xs],
                "takes part in gradients": torch.is_grad_enabled() and any(x.requires_grad for x in xs),
            }

        _, call = passes.agree(lambda: None, signature, tag)
        flat = [x.flatten(0, 1) for x in xs]
        kept = next_kept_tensors(self._cp.strategy, _WHAT)
        with unseen_by_selective_checkpoints():
            foreign = HaloFunction.apply(passes, [plan], [len(flat[0])], call, kept, *flat)  # type: ignore[no-untyped-call]
        return [torch.cat(both) for both in zip(flat, foreign, strict=True)]

    def _on(self, device: torch.device) -> tuple[Sources, HaloPlan, Tensor]:
        """Return the tokens that entries are made of, the plan of sending them, and slots by windows' last tokens."""
        if device not in self._by_device:
            windows, rank = self.windows, self._cp.rank
            with torch.inference_mode(False):  # training uses them, too
                sources = Sources(*(x.to(device) for x in windows.sources(rank, self._batch, self._held)))
                self._by_device[device] = sources, self._plan(device), windows.slots_by_end().to(device)
        return self._by_device[device]

    def _plan(self, device: torch.device) -> HaloPlan:
        """Return which token rows this rank sends to others and gets of them, as halos of one token."""
        cp, windows, batch = self._cp, self.windows, self._batch
        sends, recvs, slots = {}, {}, 0
        for rank in range(cp.ranks):
            tokens = windows.foreign(rank, batch)
            rows = torch.arange(batch, device="cpu").repeat_interleave(
                torch.tensor([*map(len, tokens)], device="cpu")
            )
            every = torch.cat(tokens)
            holders = windows.holder_of(every)
            if rank == cp.rank:
                slots = len(every)
                by_holder = {peer: torch.nonzero(holders == peer).flatten() for peer in range(cp.ranks)}
                recvs = {peer: at.to(device) for peer, at in by_holder.items() if len(at)}
            elif bool((holders == cp.rank).any()):
                own_tokens = holders == cp.rank
                sends[rank] = (rows[own_tokens] * self._held + windows.place_of(every[own_tokens])).to(device)
        return HaloPlan(cp.rank_state, sends, recvs, slots, 1, _WHAT)
