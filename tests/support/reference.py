"""The judge: attention of a whole sequence in float64 on one process, and the error against it.

Masks are painted here from their definitions, pair by pair, without the package's regions and tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    CausalBottomRight,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    PrefixTree,
    Scores,
    SlidingWindow,
)
from burst_plugin.kernels.reference import keep
from burst_plugin.sequence.mask import Both

NAMES = ("out", "dq", "dk", "dv", "dsink", "dbias")


class Problem(NamedTuple):
    """Whole sequences: q [B, Sq, Hq, D], dout [B, Sq, Hq, Dv], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv].

    `dout` and `dlse` [B, Hq, Sq] are the gradients of out and of lse, None if the loss does not depend on lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor | None = None
    bias: Tensor | None = None
    selection: Tensor | None = None
    dlse: Tensor | None = None

    @classmethod
    def draw(
        cls,
        seq_len: int | tuple[int, int],
        heads: tuple[int, int],
        dim: int | tuple[int, int] = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Problem:
        """Draw standard normal tensors, batch 2."""
        generator = torch.Generator().manual_seed(seed)
        q_len, kv_len = (seq_len, seq_len) if isinstance(seq_len, int) else seq_len
        qk_dim, v_dim = (dim, dim) if isinstance(dim, int) else dim
        shapes = [
            (2, q_len, heads[0], qk_dim),
            (2, kv_len, heads[1], qk_dim),
            (2, kv_len, heads[1], v_dim),
            (2, q_len, heads[0], v_dim),
        ]
        return cls(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))

    def with_sink(self) -> Problem:
        """Return the same problem with a sink: a logit per query head."""
        return self._replace(sink=torch.linspace(-1.0, 2.0, self.q.shape[2]).to(self.q.dtype))

    def with_bias(self, shape: tuple[int, int]) -> Problem:
        """Return the same problem with a bias of `shape`, (1 or batch, 1 or query heads)."""
        generator = torch.Generator().manual_seed(11)
        bias = torch.randn(*shape, self.q.shape[1], self.k.shape[1], generator=generator)
        return self._replace(bias=bias.to(self.q.dtype))

    def with_dlse(self) -> Problem:
        """Return the same problem with a gradient of lse, and a dout that is 0 or tiny in two thirds of the rows."""
        generator = torch.Generator().manual_seed(13)
        batch, q_len, heads = self.q.shape[:3]
        dlse = torch.randn(batch, heads, q_len, generator=generator, dtype=torch.float64)
        dlse = dlse.to(torch.promote_types(self.q.dtype, torch.float32))
        dlse.masked_fill_(torch.rand(dlse.shape, generator=generator) < 1 / 3, 0.0)
        size = torch.tensor([0.0, 1e-12, 1.0]).to(self.dout.dtype)
        dout = self.dout * size[torch.randint(3, (batch, q_len, heads, 1), generator=generator)]
        return self._replace(dlse=dlse, dout=dout)

    def with_selection(self, groups: int, count: int) -> Problem:
        """Return the same problem with lists of keys: as many as `count` for each query, some of them fewer."""
        generator = torch.Generator().manual_seed(12)
        (batch, q_len), kv_len = self.q.shape[:2], self.k.shape[1]
        order = torch.rand(batch, groups, q_len, kv_len, generator=generator).argsort(-1)[..., :count]
        missing = torch.rand(order.shape, generator=generator) < torch.rand(
            batch, groups, q_len, 1, generator=generator
        )
        return self._replace(selection=order.masked_fill(missing, -1).int())


class Result(NamedTuple):
    """Output and gradients of attention."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None
    dbias: Tensor | None = None


def painted(mask: Mask, batch: int, q_len: int, kv_len: int) -> Tensor:
    """Return which pairs attend, bool [B, Sq, Sk]."""
    if isinstance(mask, PerRow):
        return torch.cat([painted(one, 1, q_len, kv_len) for one in mask.masks])
    if isinstance(mask, Both) and not mask.trees:
        return painted(mask.one, batch, q_len, kv_len) & painted(mask.other, batch, q_len, kv_len)
    if isinstance(mask, Both) and mask.rows is not None:
        return torch.cat([painted(mask.of_row(row), 1, q_len, kv_len) for row in range(mask.rows)])
    if mask.trees:
        return _painted_tree(mask, q_len).expand(batch, q_len, kv_len)
    i, j = torch.arange(q_len).unsqueeze(1), torch.arange(kv_len)
    everything = torch.ones(q_len, kv_len, dtype=torch.bool)
    if isinstance(mask, Full):
        pairs = everything
    elif isinstance(mask, Causal):
        pairs = j <= i
    elif isinstance(mask, CausalBottomRight):
        pairs = j - kv_len <= i - q_len
    elif isinstance(mask, SlidingWindow):
        pairs = everything if mask.left is None else j >= i - mask.left
        pairs = pairs if mask.right is None else pairs & (j <= i + mask.right)
    elif isinstance(mask, PrefixLM):
        pairs = (j <= i) | (j < mask.prefix)
    elif isinstance(mask, BidirectionalSpans):
        behind = (j <= i) if mask.left is None else (j <= i) & (j >= i - mask.left)
        pairs = behind | _same_group(mask, max(q_len, kv_len))[:q_len, :kv_len]
    elif isinstance(mask, Documents):
        starts = mask.kv_cu_seqlens or mask.cu_seqlens
        kv_lengths = mask.kv_lengths if mask.kv_cu_seqlens or mask.kv_lengths else mask.lengths
        q, k = _document(mask.cu_seqlens, mask.lengths), _document(starts, kv_lengths)
        pairs = (q.unsqueeze(1) == k) & (k >= 0)
    elif isinstance(mask, Keys):
        pairs = everything & torch.tensor([any(a <= n < b for a, b in mask.spans) for n in range(kv_len)])
    elif isinstance(mask, BlockMask):
        pairs = torch.tensor([list(map(bool, row)) for row in mask.allowed])[i // mask.block, j // mask.block]
    else:
        raise TypeError(mask)
    return pairs.expand(batch, q_len, kv_len)


def _same_group(mask: BidirectionalSpans, length: int) -> Tensor:
    """Return which tokens are in one group, bool [S, S]."""
    groups = torch.full((length,), -1)
    numbers = range(len(mask.spans)) if mask.groups is None else mask.groups
    for number, (start, stop) in zip(numbers, mask.spans, strict=True):
        groups[start:stop] = number
    return (groups.unsqueeze(1) == groups) & (groups >= 0)


def _painted_tree(mask: Mask, length: int) -> Tensor:
    """Return which pairs attend in a prefix tree, path by path: there positions count as if the path were alone.

    Other masks that compare positions are painted for the path alone, those that list tokens for the sequence.
    """
    (tree,) = mask.trees
    pairs = torch.zeros(length, length, dtype=torch.bool)
    own, listing = [], []
    for each in _parts(mask):
        if not isinstance(each, PrefixTree):
            (own if each.compares_positions else listing).append(each)
    for path in tree_paths(tree):
        on_path = painted(Causal(), 1, len(path), len(path))[0]
        index = torch.tensor(path, dtype=torch.int64)
        for each in own:
            if isinstance(each, BidirectionalSpans):  # spans are those of the sequence
                behind = painted(SlidingWindow(each.left), 1, len(path), len(path))[0]
                on_path = on_path & (behind | _same_group(each, length)[index.unsqueeze(1), index])
            else:
                on_path = on_path & painted(each, 1, len(path), len(path))[0]
        pairs[index.unsqueeze(1), index] = on_path
    for each in listing:
        pairs &= painted(each, 1, length, length)[0]
    return pairs


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.one), *_parts(mask.other)] if isinstance(mask, Both) else [mask]


def tree_paths(tree: PrefixTree) -> list[list[int]]:
    """Return for every node the tokens on the path from its root, its own included."""
    paths: list[list[int]] = []
    start = 0
    for parent, count in zip(tree.parents, tree.lengths, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, start + count)])
        start += count
    return paths


def positions_of(mask: Mask, length: int) -> Tensor:
    """Return the position of every token on its path, or in the sequence where there is no prefix tree."""
    found = torch.arange(length)
    for tree in mask.trees:
        for path in tree_paths(tree):
            found[path] = torch.arange(len(path))
    return found


def _positions(mask: Mask, lengths: Sequence[int]) -> list[Tensor]:
    return [positions_of(mask, length) for length in lengths]


def painted_by_head(mask: Mask, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Return which pairs attend, bool [B, 1 or heads, Sq, Sk]."""
    if mask.head_groups is None:
        return painted(mask, batch, q_len, kv_len).unsqueeze(1)
    if isinstance(mask, Both) and not mask.trees:
        one, other = (painted_by_head(each, batch, heads, q_len, kv_len) for each in (mask.one, mask.other))
        return one & other
    groups = [painted(mask.of_head_group(each), batch, q_len, kv_len) for each in range(mask.head_groups)]
    return torch.stack([groups[head * len(groups) // heads] for head in range(heads)], 1)


def _document(starts: tuple[int, ...], lengths: tuple[int, ...] | None) -> Tensor:
    """Return the document of every position, -1 for padding."""
    found = torch.full((starts[-1],), -1)
    for number, (start, stop) in enumerate(pairwise(starts)):
        found[start : stop if lengths is None else start + lengths[number]] = number
    return found


def reference(problem: Problem, mask: Mask, scores: Scores | None = None, uses_out: bool = True) -> Result:
    """Compute attention in float64 from its definition, with PyTorch's autograd: 0 where nothing is attended to.

    Without `uses_out` the loss depends on lse alone.
    """
    scores = scores or Scores()
    inputs = [None if x is None else x.detach().double().requires_grad_() for x in (*problem[:3], *problem[4:6])]
    q, k, v, sink, bias = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    traced = Problem(q, k, v, problem.dout, sink, bias, problem.selection)
    out = attention(traced, mask, scores)
    loss = out.new_zeros(())
    if uses_out:
        loss = loss + (out * problem.dout.double()).sum()
    if problem.dlse is not None:
        lse = _logits(traced, mask, scores).logsumexp(-1)
        loss = loss + (lse.where(lse > -torch.inf, 0.0) * problem.dlse.double()).sum()
    wanted = [x for x in inputs if x is not None]
    grads = iter(_without_nan(torch.autograd.grad(loss, wanted, materialize_grads=True)))
    return Result(out.detach(), *(None if x is None else next(grads) for x in inputs))


def attention(problem: Problem, mask: Mask, scores: Scores) -> Tensor:
    """Return out [B, Sq, Hq, Dv] from the definition, with a gradient; `dout` does not matter."""
    logits, v = _logits(problem, mask, scores), problem.v
    values = v.repeat_interleave(problem.q.shape[2] // v.shape[2], dim=2)
    p = logits.softmax(-1).nan_to_num(0.0) if problem.sink is None else logits.softmax(-1)[..., :-1]
    if scores.dropout:
        p = p * keep(scores, range(p.shape[0]), range(p.shape[1]), *_positions(mask, p.shape[2:])).double()
    return torch.einsum("bhij,bjhd->bihd", p, values)


def reference_lse(problem: Problem, mask: Mask, scores: Scores | None = None) -> Tensor:
    """Return logarithms of softmax denominators, [B, Hq, Sq], float64; -inf for queries that attend to nothing."""
    exact = Problem(*(None if x is None else x.detach().double() for x in problem[:6]), problem.selection)
    return _logits(exact, mask, scores or Scores()).logsumexp(-1)


def _logits(problem: Problem, mask: Mask, scores: Scores) -> Tensor:
    """Return the logits, [B, Hq, Sq, Sk], -inf where nothing attends; the last column is the sink's, if any."""
    q, k, _, _, sink, bias, selection = problem[:7]
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2))
    logits = logits * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.alibi_slopes is not None:
        groups = mask.head_groups or 1
        pairs = [_positions(mask.of_head_group(group), (q_len, kv_len)) for group in range(groups)]
        heads = logits.shape[1] // groups
        apart = torch.stack([(q.unsqueeze(1) - k).abs() for q, k in pairs for _ in range(heads)])
        logits = logits - torch.tensor(scores.alibi_slopes, dtype=torch.float64).view(-1, 1, 1) * apart
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~painted_by_head(mask, batch, logits.shape[1], q_len, kv_len), -torch.inf)
    if selection is not None:
        by_group = selection.view(batch, -1, *selection.shape[-2:]).long()
        listed = torch.zeros(*by_group.shape[:3], kv_len + 1, dtype=torch.bool)
        listed.scatter_(3, by_group.masked_fill(by_group < 0, kv_len), True)
        by_head = listed[..., :kv_len].repeat_interleave(logits.shape[1] // by_group.shape[1], 1)
        logits = logits.masked_fill(~by_head, -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return logits


def _without_nan(grads: tuple[Tensor, ...]) -> list[Tensor]:
    """Replace NaN by 0: a softmax over -inf alone is NaN, and so is its gradient."""
    return [grad.nan_to_num(0.0) for grad in grads]


def relative(x: Tensor, truth: Tensor) -> float:
    """Return the 2-norm of the error over that of the truth."""
    return float(torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth))


def errors(result: Result, truth: Result) -> dict[str, float]:
    """Return relative errors by name, of the results that are not None."""
    pairs = zip(NAMES, result, truth, strict=True)
    return {name: relative(x, y) for name, x, y in pairs if x is not None and y is not None}
