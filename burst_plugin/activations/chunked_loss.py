"""The head of a language model and its loss on a few tokens at a time: the logits [T, V] never exist whole.

    head = Head(model.lm_head, chunk=1024)
    losses = linear_cross_entropy(hidden, head, labels)  # [T], float32
    log_probs, entropy = token_log_probs(hidden, head, tokens)

Where every token has a loss of its own, the forward pass keeps the hidden states and two numbers per token: the
log-sum-exp and the entropy. The backward pass computes the logits of a chunk once more, has the head turn their
gradient into gradients of the hidden states and of its parameters, and adds the latter up in float32: a parameter
gets one gradient, rounded once, as without chunks. For a sum or a mean of losses the forward pass lacks only one
factor, the gradient of that scalar, so it turns each chunk's logits into gradients at once, and no logits are
computed twice. In a process group whose ranks have a share of the vocabulary each (`group`), a chunk's sums are
reduced over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from burst_plugin.activations.recomputed_chunks import (
    GradientSums,
    Surroundings,
    check_all_are_listed,
    gradients_of,
    in_one_call,
    is_unit,
    trained_among,
    wide_dtype,
)
from burst_plugin.activations.snapshot import Snapshot
from burst_plugin.checks import number, shown, whole_number

_REDUCTIONS = ("none", "sum", "mean")
_FLOAT16_SCALE = 256.0  # of gradients in float16, so that small ones are not 0
_UNLISTED = "pass parameters=[...] with all that it trains"


@dataclass(frozen=True, eq=False)
class Head:
    """The head of a language model, on `chunk` tokens at a time.

    project: the head, a module such as `nn.Linear`, or any function of hidden states [N, H] to logits [N, V], row by
        row. It is called once per chunk, in the backward pass again; a unit of `fully_shard` is called once, and its
        `forward` for the chunks.
    chunk: rows of logits at a time, at least 1.
    softcap: logits z become softcap * tanh(z / softcap); None for no cap.
    scale: the factor on logits, after the cap; one over the temperature.
    group: the process group whose ranks have equal shares of the vocabulary, in the order of the ranks, or None if
        every rank has all of it. With a group, `project` returns this rank's share of the logits, losses are
        collective, and the gradient of hidden states is of this share alone: the head itself has to add it up.
    parameters: the tensors besides hidden states that get a gradient; needed if `project` is a function and no
        module. Tensors that need no gradient may be among them.
    listed: the tensors in `parameters`, or if that is None the parameters of the module `project`.

    Raises ValueError for options that are not valid.

        head = Head(model.lm_head, chunk=1024)
    """

    project: Callable[[Tensor], Tensor]
    _: KW_ONLY
    chunk: int
    softcap: float | None = None
    scale: float = 1.0
    group: dist.ProcessGroup | None = None
    parameters: Iterable[Tensor] | None = None
    listed: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        chunk = whole_number("chunk={}", self.chunk, "use a number of tokens, at least 1", least=1)
        object.__setattr__(self, "chunk", chunk)
        if self.softcap is not None and number("softcap={}", self.softcap, "use a positive number, or None") <= 0:
            raise ValueError(f"softcap={shown(self.softcap)} is not valid; use a positive number, or None")
        object.__setattr__(self, "scale", number("scale={}", self.scale, "use a number"))
        parameters = self.parameters
        if parameters is None:
            if not isinstance(self.project, torch.nn.Module):
                raise ValueError(
                    f"project is {shown(self.project)}, whose trained parameters cannot be determined; pass the "
                    "module itself, or parameters=[...], [] for none"
                )
            parameters = self.project.parameters()
        object.__setattr__(self, "listed", tuple(parameters))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H], or this rank's share of them."""
        logits = self.project(hidden)
        if logits.dim() != 2 or len(logits) != len(hidden):
            raise ValueError(
                f"project returned {list(logits.shape)} for hidden states {list(hidden.shape)}; expected logits "
                f"[{len(hidden)}, V]"
            )
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.scale == 1.0 else logits * self.scale

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the chunks of `rows` rows as slices, one after the other; if there are no rows, one empty slice.

        So a head without rows still has gradients, of 0, which other ranks wait for.
        """
        for start in range(0, max(1, rows), self.chunk):
            yield slice(start, min(start + self.chunk, rows))

    def first_token(self, share: int) -> int:
        """Return the id of the first token in this rank's share of the vocabulary: 0 without a `group`.

        share: the number of tokens in each rank's share.
        """
        return 0 if self.group is None else dist.get_rank(self.group) * share


def linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    reduction: str = "none",
    divisor: Tensor | float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross entropy of a head's logits and `labels`; at most `head.chunk` rows of logits exist at a time.

    Args:
        hidden: [..., H], the hidden states before the head.
        labels: [...], whole numbers; `ignore_index` where there is none, which is a loss of 0.
        reduction: "none", "sum", or "mean" over the labels that count (0 if none does). Gradients of the last two are
            computed with the losses; until the backward pass they take 4 bytes per parameter of the head.
        divisor: for "sum", a number that the sum is divided by, such as the number of labels on all ranks.
        z_loss: the weight of logsumexp(logits) ** 2, which is added to each loss.
        label_smoothing: only 0 is supported.

    Returns:
        Losses of the shape of `labels`, or a scalar; in float32, or float64 if `hidden` is.

    Raises:
        ValueError: for shapes, numbers and options that are not valid, and in the backward pass if the head has
            trained parameters that are not in its `parameters`.
        RuntimeError: in the backward pass, if a tensor that the head reads, trained or not, has been modified in
            place since, or if a module in it has other tensors, another mode or other adapters than in the forward
            pass.

    Example:
        loss = linear_cross_entropy(hidden, Head(model.lm_head, chunk=1024), labels, reduction="mean")
        loss.backward()
    """
    if label_smoothing:
        raise ValueError(
            f"label_smoothing={shown(label_smoothing)} is not supported in chunks: leave it out, or compute the loss "
            "of whole logits"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={shown(reduction)} is not valid; use one of: {', '.join(_REDUCTIONS)}")
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor={shown(divisor)} is for reduction='sum', got {reduction!r}; leave it out")
    z_weight = number("z_loss={}", z_loss, "use a number, 0 for none")
    _check_shapes(hidden, labels, "labels")
    counted = (labels != ignore_index).flatten()
    targets = labels.flatten().masked_fill(~counted, 0)
    if reduction == "none":
        log_probs, log_sums, _ = _in_unit(head, hidden, lambda x, whole: _run(x, targets, whole))
        losses: Tensor = -log_probs + z_weight * log_sums.square() if z_weight else -log_probs
        return losses.where(counted, losses.new_zeros(())).view(labels.shape)
    count = counted.sum().clamp(min=1) if reduction == "mean" else 1 if divisor is None else divisor
    divisor = torch.as_tensor(count, device=hidden.device)
    total: Tensor = _in_unit(head, hidden, lambda x, whole: _summed(x, targets, counted, divisor, z_weight, whole))
    return total


def token_log_probs(hidden: Tensor, head: Head, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each of `tokens`, and the entropy of the head's distribution at each position.

    At most `head.chunk` rows of logits exist at a time. Every token counts: the caller has to mask padding.

    Args:
        hidden: [..., H], the hidden states before the head, at the positions that predict `tokens`.
        head: the head, with the cap and the temperature of the distribution.
        tokens: [...], whole numbers.

    Returns:
        Both with gradients and of the shape of `tokens`; in float32, or float64 if `hidden` is.

    Raises:
        ValueError: for shapes that do not go together, and in the backward pass if the head has trained parameters
            that are not in its `parameters`.
        RuntimeError: in the backward pass, if a tensor or module that the head reads has changed since.

    Example:
        log_probs, entropy = token_log_probs(hidden, Head(model.lm_head, chunk=1024), tokens)
        loss = -(advantages * log_probs + 0.01 * entropy).mean()
    """
    _check_shapes(hidden, tokens, "tokens")
    of_rows = tokens.flatten()
    log_probs, _, entropy = _in_unit(head, hidden, lambda x, whole: _run(x, of_rows, whole, with_entropy=True))
    return log_probs.view(tokens.shape), entropy.view(tokens.shape)


def _check_shapes(hidden: Tensor, targets: Tensor, name: str) -> None:
    if hidden.dim() < 1 or hidden.shape[:-1] != targets.shape or targets.is_floating_point():
        raise ValueError(
            f"hidden {list(hidden.shape)} and {name} {list(targets.shape)} of {targets.dtype} do not go together; "
            f"expected hidden [..., H] and whole numbers [...]"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_unit(head: Head, hidden: Tensor, loss: Callable[[Tensor, Head], Any]) -> Any:
    """Return `loss(hidden, head)`; where the head is a unit of `fully_shard`, computed in one call of the unit."""
    if not is_unit(head.project):
        return loss(hidden, head)
    unit: Any = head.project
    others = [hook for hook in unit._forward_hooks.values() if not _is_of_fsdp(hook)]
    if others:
        raise ValueError(
            f"project, a unit of fully_shard, has a forward hook {shown(others[0])}, which would get losses in place "
            "of logits; remove it, or leave project to the unit around it and compute the loss in that unit's forward"
        )

    def computed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return loss(x, replace(head, project=forward, parameters=unit.parameters()))

    return in_one_call(unit, hidden, computed)


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


# ---------------------------------------------------------------------------------------------------------- autograd


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(hidden: Tensor, targets: Tensor, head: Head, *, with_entropy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, log-sum-exps and entropies of tokens, [T] each."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    results: tuple[Tensor, Tensor, Tensor] = _LossByChunk.apply(  # type: ignore[no-untyped-call]
        rows, targets, head, with_entropy, *trained_among(head.listed)
    )
    return results


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(hidden: Tensor, targets: Tensor, counted: Tensor, divisor: Tensor, z_weight: float, head: Head) -> Tensor:
    """Return the sum of the losses of the tokens that are counted, divided by a scalar."""
    rows, trained = hidden.reshape(-1, hidden.shape[-1]), trained_among(head.listed)
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        # A gradient over the number of tokens would be too small for float16: it is divided by a number from 0.5 to 1
        # first, and by a power of two in the backward pass.
        divisor = divisor.to(wide_dtype(hidden.dtype))
        near_one = torch.frexp(divisor)[0].masked_fill(divisor == 0, 1.0)
        scale = _FLOAT16_SCALE if hidden.dtype == torch.float16 else 1.0
        weights = counted * (scale / near_one)
        scaled_sum: Tensor = _SumByChunk.apply(rows, targets, weights, z_weight, head, *trained)  # type: ignore[no-untyped-call]
        # The mean over no labels is NaN, as everywhere; its gradient is 0.
        factor = (near_one / scale / divisor).masked_fill(divisor == 0, 0.0)
        return scaled_sum * factor + (divisor - divisor) / divisor
    log_probs, log_sums, _ = _run(hidden, targets, head)
    losses = z_weight * log_sums.square() - log_probs
    total: Tensor = torch.div(losses.where(counted, losses.new_zeros(())).sum(), divisor)
    return total


class _SumByChunk(torch.autograd.Function):
    """The head and the weighted sum of its losses as one step of autograd; its forward computes gradients as well."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weights: Tensor, z_weight: float, head: Head, *trained: Tensor
    ) -> Tensor:
        wants_hidden = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        total, sums = weights.new_zeros(()), GradientSums(trained)
        # Hooks of a checkpoint around this would compute all of it again, once for each chunk.
        with torch.enable_grad(), sums.collecting(), saved_tensors_hooks(_as_it_is, _as_it_is):
            for rows in head.chunks(len(hidden)):
                x, weight = hidden[rows].detach().requires_grad_(wants_hidden), weights[rows]
                with sums.of_linears():
                    logits = head.logits(x)
                if not rows.start:
                    check_all_are_listed(logits, [x, *trained], "project", _UNLISTED)
                z = logits.detach()
                log_probs, log_sums = _terms(z, targets[rows], head, False)
                losses = z_weight * log_sums.square() - log_probs
                total += (weight * losses).where(weight != 0, losses.new_zeros(())).sum()
                grads = (-weight, 2 * z_weight * weight * log_sums, weight)  # the last, of an entropy, is not used
                grad_logits = _grad_of_logits(z, targets[rows], log_sums, None, grads, head)
                inputs = [x, *trained] if wants_hidden else [*trained]
                parts = gradients_of(logits, inputs, grad_logits)
                del logits, z, grad_logits
                of_hidden = parts.pop(0) if wants_hidden else None
                if grad_hidden is not None:
                    grad_hidden[rows] = 0 if of_hidden is None else of_hidden
                sums.add(parts)
        ctx.grad_hidden, ctx.sums, ctx.chunks = grad_hidden, sums, [*head.chunks(len(hidden))]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden = None
        if ctx.grad_hidden is not None:
            grad_hidden = torch.empty_like(ctx.grad_hidden)
            for rows in ctx.chunks:
                grad_hidden[rows] = ctx.grad_hidden[rows] * grad[None]  # in float32
        grads = ctx.sums.times(grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            del ctx.grad_hidden, ctx.sums  # a loss may outlive its step
        return (grad_hidden, None, None, None, None, *grads)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _LossByChunk(torch.autograd.Function):
    """The head and the loss of its logits as one step of autograd, so that a parameter gets one gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: Head, with_entropy: bool, *trained: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        read = Snapshot.of(head.project, head.listed)
        ctx.head, ctx.with_entropy, ctx.trained = head, with_entropy, trained
        ctx.surroundings = Surroundings.of(hidden, read)
        results = [hidden.new_empty(len(hidden), dtype=wide_dtype(hidden.dtype)) for _ in range(3)]
        if not with_entropy:
            results[2].zero_()
        with ctx.surroundings.autocast():
            for rows in head.chunks(len(hidden)):
                logits = head.logits(hidden[rows])
                for result, part in zip(results, _terms(logits, targets[rows], head, with_entropy), strict=False):
                    result[rows] = part
                del logits
        ctx.save_for_backward(hidden, targets, results[1], results[2])  # hooks would give copies of parameters back
        return results[0], results[1], results[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, log_sums, entropy = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden = ctx.needs_input_grad[0]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        trained, sums = ctx.trained, GradientSums(ctx.trained)
        with ctx.surroundings.again(), sums.collecting():
            for rows in head.chunks(len(hidden)):
                x = hidden[rows].detach().requires_grad_(wants_hidden)
                with torch.enable_grad(), sums.of_linears():
                    logits = head.logits(x)
                if not rows.start:
                    check_all_are_listed(logits, [x, *trained], "project", _UNLISTED)
                saved = targets[rows], log_sums[rows], entropy[rows] if ctx.with_entropy else None
                grad_logits = _grad_of_logits(logits, *saved, tuple(grad[rows] for grad in grads), head)
                inputs = [x, *trained] if wants_hidden else [*trained]
                parts = gradients_of(logits, inputs, grad_logits)
                del logits, grad_logits
                of_hidden = parts.pop(0) if wants_hidden else None
                if grad_hidden is not None:
                    grad_hidden[rows] = 0 if of_hidden is None else of_hidden
                sums.add(parts)
        return (grad_hidden, None, None, None, *sums.cast())


def _terms(logits: Tensor, targets: Tensor, head: Head, with_entropy: bool) -> list[Tensor]:
    """Return log-probabilities of targets, log-sum-exps and, if asked for, entropies: [N] each."""
    top = logits.amax(-1).to(wide_dtype(logits.dtype))
    if head.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=head.group)
    below = logits - top[:, None]  # wide as well
    index, is_here = _in_share(targets, logits.shape[-1], head)
    of_targets = below.gather(-1, index)[:, 0].masked_fill(~is_here, 0.0)
    weights = below.exp() if with_entropy else below.exp_()
    sums = [weights.sum(-1), of_targets]
    if with_entropy:
        sums.append((weights * below.masked_fill_(weights == 0, 0.0)).sum(-1))  # 0 * -inf is 0 here
    reduced = torch.stack(sums)
    if head.group is not None:
        dist.all_reduce(reduced, group=head.group)
    log_sums = reduced[0].log()
    found = [reduced[1] - log_sums, top + log_sums]
    return [*found, log_sums - reduced[2] / reduced[0]] if with_entropy else found


def _grad_of_logits(
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    entropy: Tensor | None,
    grads: tuple[Tensor, ...],
    head: Head,
) -> Tensor:
    """Return the gradient of logits z from `grads`: of log p(target), of L = log-sum-exp and of the entropy E.

    With p = exp(z - L): d log p(target) = onehot - p, dL = p, and dE = -p (log p + E).
    """
    grad_log_probs, grad_log_sums, grad_entropy = grads
    log_p = logits.detach() - log_sums[:, None]  # as wide as these
    grad = log_p.exp_() if entropy is None else log_p.exp()
    if entropy is None:
        grad *= (grad_log_sums - grad_log_probs)[:, None]
    else:
        log_p.masked_fill_(grad == 0, 0.0)
        grad *= (grad_log_sums - grad_log_probs - grad_entropy * entropy)[:, None] - grad_entropy[:, None] * log_p
    index, is_here = _in_share(targets, grad.shape[-1], head)
    grad.scatter_add_(-1, index, (grad_log_probs * is_here)[:, None])
    return grad.to(logits.dtype)


def _in_share(targets: Tensor, share: int, head: Head) -> tuple[Tensor, Tensor]:
    """Return the columns [N, 1] of targets in this rank's share of the vocabulary, and whether they are in it."""
    index = targets - head.first_token(share)
    if head.group is None:
        return index[:, None], torch.ones_like(index, dtype=torch.bool)
    is_here = (index >= 0) & (index < share)
    return index.masked_fill(~is_here, 0)[:, None], is_here
