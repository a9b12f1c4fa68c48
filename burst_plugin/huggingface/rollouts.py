"""Log-probabilities of rollouts, folded into one sequence that a model of transformers computes over a ring.

In a folded sequence, beginnings that rollouts share occur once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from burst_plugin.activations import Head
from burst_plugin.activations.deferred_logits import DeferredLogits
from burst_plugin.batch import IGNORED_LABEL, shard_batch
from burst_plugin.checks import number, shown
from burst_plugin.context import ContextParallel
from burst_plugin.huggingface.attention import EXAMINED
from burst_plugin.huggingface.chunked_loss import ChunkedLoss, restore_head, take_head
from burst_plugin.huggingface.mask_recipes import shard_of_forward
from burst_plugin.huggingface.router_losses import RouterLosses, asks_for_router_loss, problem_of_router_loss
from burst_plugin.ring.agreement import error_text, prepared_together
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.trajectories import Edges, Folded, edge_log_probs, fold, unfold


class _Values(NamedTuple):
    log_probs: list[Tensor]
    entropies: list[Tensor]
    tokens: int


class RolloutLogProbs(_Values):
    """A model's log-probabilities of rollouts, a named tuple of three values, with a fourth as an attribute.

    log_probs: for each rollout [T - 1], float32 or float64; entry t is the log-probability of its token t + 1.
    entropies: for each rollout [T - 1]; the entropies of the distributions that its tokens were drawn from.
    tokens: the number of tokens that the model computed, over all ranks, without padding.
    router_loss: the attribute, no part of the tuple: the load-balancing loss of its experts over all tokens of the
        rollouts, as if these were a padded batch; None if that was not asked for.
    """

    router_loss: Tensor | None = None


def rollout_log_probs(
    model: torch.nn.Module,
    rollouts: Iterable[Sequence[int] | Tensor],
    cp: ContextParallel,
    *,
    own: bool = False,
    temperature: float = 1.0,
    chunk: int = 1024,
    router_loss: bool | None = None,
) -> RolloutLogProbs:
    """Return the log-probabilities of rollouts, whose shared beginnings are computed once; collective.

    Rollouts are folded into one sequence, of which all ranks have equally many tokens.

    Args:
        model: a causal language model of transformers, perhaps wrapped, after `prepare`.
        rollouts: token ids, [T] each, prompt and answer without padding.
        cp: the context-parallel group.
        own: whether every rank gives rollouts of its own, at least one, and computes a loss of its own from their
            values, as data-parallel ranks do. The ring folds the rollouts of all its ranks together. By default all
            ranks give the same rollouts, and compute the same loss.
        temperature: what logits are divided by, above 0.
        chunk: logits of so many tokens exist at a time.
        router_loss: whether to return the load-balancing loss of experts, of this rank's rollouts with `own`. By
            default if the model's configuration has `output_router_logits`.

    Returns:
        A `RolloutLogProbs`. A rank's gradients of parameters come from its tokens, and are to be added up over ranks.
        They are gradients of the loss or, with `own`, of the sum of all ranks' losses; its backward pass is
        collective. Where gradients are averaged, as by DistributedDataParallel, the loss is to be multiplied by the
        number of ranks, or, with `own`, is the mean of the ranks' losses.

    Raises:
        ValueError: on every rank, for arguments or a model that are not as described, or if ranks differ.

    Example:
        log_probs, entropies, _ = rollout_log_probs(model, rollouts, cp)
        answers = [x[len(prompt) - 1 :] for x in log_probs]
        loss = -sum((advantage * x).mean() for advantage, x in zip(advantages, answers))
        loss.backward()  # then gradients are added up over the ranks of cp
    """
    pretrained = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    all_rollouts, sizes = _of_all_ranks(rollouts, cp) if own else (rollouts, [])

    def agree(folded: Any, problem: str) -> None:
        named = {"temperature": float(temperature), "own": bool(own), "router_loss": router_loss}
        compared = {} if folded is None else named
        cp.agree(compared, problem, "rollouts")

    routers: Tensor | None = None
    try:
        prepare = partial(_prepared, pretrained, all_rollouts, (temperature, chunk), cp, router_loss)
        (ids, _, tree, edges), adds = prepared_together(prepare, agree)[0]
        local = shard_batch({"input_ids": ids, "tree": tree}, cp)
        asked = {} if adds is None else {"output_router_logits": adds}
        labels = local["input_ids"]
        assert pretrained is not None, "else it could not be prepared"
        rows = _rows_of_ranks(edges, ids.shape[1], sizes or [len(edges.paths)]) if adds else None
        with nullcontext() if rows is None else RouterLosses(pretrained, rows) as losses:
            # What models return as their loss goes through hooks, and wrappers such as those of data parallelism.
            values = model(**local, labels=labels, shift_labels=labels, use_cache=False, **asked).loss
            routers = None if losses is None else losses.of_groups(cp)
    finally:
        if pretrained is not None:
            restore_head(pretrained)
    if own and cp.ranks > 1:
        values = _LossOfAll.apply(values, cp)  # type: ignore[no-untyped-call]
        routers = None if routers is None else _LossOfAll.apply(routers, cp)  # type: ignore[no-untyped-call]
    start = sum(sizes[: cp.rank])
    own_part = slice(start, start + sizes[cp.rank]) if own else slice(None)
    log_probs, entropies = (unfold(column, edges)[own_part] for column in values.unbind(-1))
    result = RolloutLogProbs(log_probs, entropies, ids.shape[1])
    result.router_loss = None if routers is None else routers[cp.rank if own else 0]
    return result


def _rows_of_ranks(edges: Edges, length: int, sizes: Sequence[int]) -> Tensor:
    """Return how many rollouts of each rank [ranks, S] go through each token of the folded sequence.

    sizes: the number of rollouts of each rank, which follow one another.
    """
    counts = torch.zeros(len(sizes), length, device="cpu")
    owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    for owner, path in zip(owners, edges.paths, strict=True):
        counts[owner, path.cpu()] += 1
    return counts


def _prepared(
    pretrained: PreTrainedModel | None,
    rollouts: Iterable[Any],
    options: tuple[float, int],
    cp: ContextParallel,
    router_loss: bool | None,
) -> tuple[Folded, bool | None]:
    """Return the rollouts folded, and have the head compute their log-probabilities in the model's next forward.

    Also returns whether the model adds a router loss; None if it has none to add.
    """
    temperature, chunk = options
    if pretrained is None or not hasattr(pretrained, EXAMINED):
        raise ValueError("rollout_log_probs is for models on the ring; call burst_plugin.huggingface.prepare(model)")
    if number("temperature={}", temperature, "use a positive number") <= 0:
        raise ValueError(f"temperature={shown(temperature)} is not valid; use a positive number")
    has_routers = hasattr(pretrained.config.get_text_config(), "output_router_logits")
    adds = asks_for_router_loss(pretrained, {"output_router_logits": router_loss})
    problem = problem_of_router_loss(pretrained, True) if adds else ""
    if problem:
        raise ValueError(f"{type(pretrained).__name__} cannot run on a ring: {problem}")
    folded = fold(rollouts)
    device = pretrained.get_input_embeddings().weight.device
    folded = folded._replace(ids=folded.ids.to(device))
    take_head(pretrained, _EdgeValues(pretrained, chunk, folded.edges, 1 / temperature, cp))
    return folded, adds if has_routers else None


class _EdgeValues(ChunkedLoss):
    """Takes the place of a loss, and returns log-probabilities and entropies of edges, [E, 2]."""

    def __init__(self, model: PreTrainedModel, chunk: int, edges: Edges, scale: float, cp: ContextParallel) -> None:
        super().__init__(model, chunk)
        self._edges, self._scale, self._cp = edges, scale, cp

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, logits: DeferredLogits, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the values of all edges, on every rank."""
        self.loss = self._with_head(logits, labels, IGNORED_LABEL)
        return self.loss

    def loss_of(self, hidden: Tensor, head: Head, labels: Tensor, ignore_index: int, count: Tensor | float) -> Tensor:
        """Return log-probabilities and entropies of all edges, [E, 2], on every rank; collective.

        hidden, head: see `ChunkedLoss.loss_of`. The other arguments are not used: tokens to predict are in the edges.
        """
        scaled = Head(head.project, chunk=head.chunk, scale=self._scale, parameters=head.listed)
        shard = shard_of_forward()
        assert shard is not None, "this forward was given one"
        return torch.stack(edge_log_probs(hidden, scaled, self._edges, self._cp, tokens=shard.tokens), -1)


class _LossOfAll(torch.autograd.Function):
    """Values that every rank has and computes a loss of its own from; gradients belong to the sum of these losses."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return values.view_as(values)

    @staticmethod
    @between_graphs
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.cp.meet("the backward pass of values of all rollouts")
        total = grad.contiguous().clone()
        with ctx.cp.rank_state.alone():
            dist.all_reduce(total, group=ctx.cp.group)
        return total, None


def _of_all_ranks(rollouts: Iterable[Any], cp: ContextParallel) -> tuple[list[Tensor], list[int]]:
    """Return the rollouts of all ranks in their order, on the CPU, and how many each rank has; collective.

    Raises ValueError on every rank if the argument of any rank is not a list of rollouts.
    """
    cp.rank_state.check_open()
    own_rollouts: list[Tensor] | str
    try:
        ids, _, _, edges = fold(rollouts)
        own_rollouts = [ids[0, path].to("cpu", torch.int32) for path in edges.paths]
    except Exception as error:  # of any kind: the other ranks must know of it
        own_rollouts = error_text(error)
    gathered: list[Any] = [own_rollouts]
    if cp.group is not None and cp.ranks > 1:
        gathered = [None] * cp.ranks
        with cp.rank_state.alone():
            dist.all_gather_object(gathered, own_rollouts, group=cp.group)
    problems = [f"rank {rank}: {entry}" for rank, entry in enumerate(gathered) if isinstance(entry, str)]
    if problems:
        raise ValueError("; ".join(problems))
    return [x for entry in gathered for x in entry], [*map(len, gathered)]
