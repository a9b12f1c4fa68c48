"""The head and the loss in chunks of tokens: values and gradients against whole logits in float64, and the peak."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from burst_plugin.activations import Head, linear_cross_entropy, token_log_probs
from burst_plugin.activations.deferred_logits import DeferredLogits
from tests.support.largest import LargestLogits
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_ranks

ROWS, WIDTH, VOCAB, CHUNK = 50, 24, 67, 8
CHUNKS = (1, CHUNK, ROWS, 4 * ROWS)


def drawn(dtype: torch.dtype = torch.float32, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states [2, rows / 2, H], a head, and labels of which some do not count."""
    torch.manual_seed(seed)
    hidden = torch.randn(2, rows // 2, WIDTH).to(dtype).requires_grad_()
    head = nn.Linear(WIDTH, VOCAB).to(dtype)
    labels = torch.randint(VOCAB, (2, rows // 2))
    return hidden, head, labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a head, and the others."""
    of_head = {
        name: options.pop(name) for name in ("chunk", "softcap", "scale", "group", "parameters") if name in options
    }
    return of_head, options


def cross_entropy(hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, **options: Any) -> Tensor:
    of_head, others = _split(options)
    return linear_cross_entropy(hidden, Head(project, **of_head), labels, **others)


def log_probs_of(
    hidden: Tensor, project: Callable[[Tensor], Tensor], tokens: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return token_log_probs(hidden, Head(project, **options), tokens)


def whole_loss(hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor, **options: Any) -> Tensor:
    """The definition, on whole logits: losses of all tokens."""
    logits = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    logits = logits * options.get("scale", 1.0)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    penalty = options.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2
    return losses + penalty * (labels != -100)


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [grad.double() for grad in torch.autograd.grad(loss, tensors)]


def error(found: Tensor, truth: Tensor) -> float:
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.25}, {"z_loss": 0.02, "softcap": 3.0}])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_losses_and_gradients_are_those_of_whole_logits(chunk: int, options: dict[str, float]) -> None:
    hidden, head, labels = drawn()
    upstream = torch.randn(labels.shape)
    found = cross_entropy(hidden, head, labels, chunk=chunk, **options)
    truth = whole_loss(hidden, head, labels, **options)
    assert found.dtype == torch.float32
    assert error(found, truth) < 1e-6
    tensors = (hidden, head.weight, head.bias)
    for got, expected in zip(
        gradients((found * upstream).sum(), *tensors), gradients((truth * upstream).sum(), *tensors), strict=True
    ):
        assert error(got, expected) < 1e-6


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": 0.5}])
def test_log_probabilities_and_entropies_have_the_gradients_of_whole_logits(options: dict[str, float]) -> None:
    hidden, head, labels = drawn(torch.float64)
    tokens = labels.clamp(min=0)
    found = log_probs_of(hidden, head, tokens, chunk=CHUNK, **options)
    logits = head(hidden)
    if options:
        logits = 0.5 * 2.0 * torch.tanh(logits / 2.0)
    log_p = logits.log_softmax(-1)
    truth = log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    upstream = torch.randn(2, *tokens.shape, dtype=torch.float64)
    for got, expected in zip(found, truth, strict=True):
        assert error(got, expected) < 1e-12
    tensors = (hidden, head.weight, head.bias)
    for got, expected in zip(
        gradients((torch.stack(found) * upstream).sum(), *tensors),
        gradients((torch.stack(truth) * upstream).sum(), *tensors),
        strict=True,
    ):
        assert error(got, expected) < 1e-12


def test_tokens_that_are_masked_out_of_the_vocabulary_have_no_share_in_entropy() -> None:
    hidden, head, labels = drawn(torch.float64)
    out = torch.zeros(VOCAB, dtype=torch.float64).index_fill(0, torch.arange(5, VOCAB), -torch.inf)
    tokens = labels.clamp(0, 4)
    log_probs, entropy = log_probs_of(
        hidden, lambda x: head(x) + out, tokens, chunk=CHUNK, parameters=[head.weight, head.bias]
    )
    log_p = head(hidden)[..., :5].log_softmax(-1)
    truth = -(log_p.exp() * log_p).sum(-1)
    assert error(entropy, truth) < 1e-12
    got, expected = (
        gradients(entropy.sum() + log_probs.sum(), hidden),
        gradients(truth.sum() + log_p.gather(-1, tokens[..., None]).sum(), hidden),
    )
    assert error(got[0], expected[0]) < 1e-12


def test_bfloat16_is_as_exact_in_64_chunks_as_with_whole_logits() -> None:
    """Against float64 on the same numbers. Adding up 64 gradients in bfloat16 has several times the error."""
    hidden, head, labels = drawn(torch.bfloat16, rows=1024)
    wide = nn.Linear(WIDTH, VOCAB).double()
    wide.load_state_dict({name: x.double() for name, x in head.state_dict().items()})
    x = hidden.detach().double().requires_grad_()
    truth = gradients(whole_loss(x, wide, labels).sum(), x, wide.weight, wide.bias)
    tensors = (hidden, head.weight, head.bias)
    whole = gradients(whole_loss(hidden, head, labels).sum(), *tensors)
    found = gradients(cross_entropy(hidden, head, labels, chunk=16, reduction="sum"), *tensors)
    for got, unchunked, exact in zip(found, whole, truth, strict=True):
        assert error(got, exact) < 1.2 * error(unchunked, exact)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(reduction: str) -> None:
    hidden, head, labels = drawn()
    found = cross_entropy(hidden, head, labels, chunk=CHUNK, reduction=reduction)
    truth = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)
    assert error(found, truth) < 1e-6
    none = torch.full_like(labels, -100)
    assert cross_entropy(hidden, head, none, chunk=CHUNK, reduction=reduction).item() == 0.0


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_are_never_whole(softcap: float | None) -> None:
    hidden, head, labels = drawn(rows=400)
    with LargestLogits(VOCAB, WIDTH) as largest:
        loss = cross_entropy(hidden, head, labels, chunk=CHUNK, reduction="sum", softcap=softcap)
    assert largest.rows == CHUNK
    with largest:
        torch.autograd.grad(loss, [hidden, head.weight])
    assert largest.rows == CHUNK
    with largest:
        whole_loss(hidden, head, labels)
    assert largest.rows == 400, "or it does not see what it is to see"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_takes_its_logits_and_their_gradient(dtype: torch.dtype) -> None:
    """Beside these one sum of the weight's gradient, also while the next chunk's logits are at their largest.

    Either both are in float32, or both are in 16 bits while the gradient is there in float32, too.
    """
    rows, width, vocab = 256, 32, 4096
    hidden = torch.randn(4 * rows, width).to(dtype).requires_grad_()
    head = nn.Linear(width, vocab, bias=False).to(dtype)
    labels = torch.randint(vocab, (4 * rows,))
    with LiveBytes() as live:
        cross_entropy(hidden, head, labels, chunk=rows, reduction="mean").backward()
    logits, weight = 8 * rows * vocab, 4 * head.weight.numel()
    assert live.peak < 1.02 * (logits + weight + hidden.nbytes)


# ----------------------------------------------------------------------------------------------- parameters of heads


class _Lora(nn.Module):
    """A frozen head with a trained update of low rank, as PEFT has it, and dropout."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, VOCAB, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x)))


def test_a_frozen_head_trains_its_adapter_and_hidden_states() -> None:
    hidden, base, labels = drawn()
    head = _Lora(base)
    found = cross_entropy(hidden, head, labels, chunk=CHUNK).sum()
    tensors = (hidden, head.a.weight, head.b.weight)
    for got, expected in zip(
        gradients(found, *tensors), gradients(whole_loss(hidden, head, labels).sum(), *tensors), strict=True
    ):
        assert error(got, expected) < 1e-6
    cross_entropy(hidden, head, labels, chunk=CHUNK).sum().backward()
    assert base.weight.grad is None


def test_a_head_is_trained_on_hidden_states_that_are_not() -> None:
    hidden, head, labels = drawn()
    cross_entropy(hidden.detach(), head, labels, chunk=CHUNK).sum().backward()
    expected = gradients(whole_loss(hidden, head, labels).sum(), head.weight)[0]
    assert error(head.weight.grad, expected) < 1e-6


def test_dropout_in_a_head_is_the_same_in_the_backward_pass() -> None:
    hidden, base, labels = drawn()
    head = _Lora(base, dropout=0.5)
    rows = hidden.flatten(0, 1)
    torch.manual_seed(7)
    loss = cross_entropy(rows, head, labels.flatten(), chunk=CHUNK).sum()
    torch.rand(3)
    after = torch.get_rng_state()
    found = gradients(loss, hidden, head.b.weight)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(7)
    logits = torch.cat([head(part) for part in rows.split(CHUNK)])
    expected = gradients(F.cross_entropy(logits, labels.flatten(), reduction="sum"), hidden, head.b.weight)
    for got, truth in zip(found, expected, strict=True):
        assert error(got, truth) < 1e-6


def test_hooks_of_a_parameter_see_one_gradient() -> None:
    hidden, head, labels = drawn()
    seen, accumulated = [], []
    head.weight.register_hook(lambda grad: seen.append(grad.clone()) or 0.5 * grad)
    head.weight.register_post_accumulate_grad_hook(lambda x: accumulated.append(x.grad.clone()))
    cross_entropy(hidden, head, labels, chunk=CHUNK).sum().backward()
    truth = torch.autograd.grad(whole_loss(hidden, head, labels).sum(), head.bias)[0]
    assert (len(seen), len(accumulated)) == (1, 1)
    assert torch.equal(accumulated[0], 0.5 * seen[0])
    assert error(head.bias.grad, truth) < 1e-6
    assert head.weight._backward_hooks


def test_hooks_of_a_computed_weight_see_one_gradient() -> None:
    hidden, head, labels = drawn()
    grads = []
    for chunked in (True, False):
        weight = head.weight * 2
        weight.register_hook(lambda grad: 3 * grad)
        project = partial(F.linear, weight=weight)
        if chunked:
            losses = cross_entropy(hidden, project, labels, chunk=CHUNK, parameters=[weight])
        else:
            losses = whole_loss(hidden, project, labels)
        grads.append(gradients(losses.sum(), head.weight)[0])
    assert error(*grads) < 1e-6


@pytest.mark.parametrize("sampled", [False, True])
def test_without_rows_gradients_are_zero(sampled: bool) -> None:
    """And not missing, as without chunks: other ranks may wait for them."""
    head, hidden = nn.Linear(WIDTH, VOCAB), torch.empty(0, WIDTH, requires_grad=True)
    labels = torch.empty(0, dtype=torch.long)
    if sampled:
        losses = torch.cat(log_probs_of(hidden, head, labels, chunk=CHUNK))
    else:
        losses = cross_entropy(hidden, head, labels, chunk=CHUNK)
    losses.sum().backward()
    assert losses.shape == (0,)
    for each in (head.weight, head.bias, hidden):
        assert each.grad is not None
        assert not each.grad.any()


def test_a_head_is_frozen_and_trained_again() -> None:
    """Which of its parameters get gradients is asked at each call."""
    hidden, module, labels = drawn()
    module.requires_grad_(False)
    head = Head(module, chunk=CHUNK)
    linear_cross_entropy(hidden, head, labels).sum().backward()
    assert module.weight.grad is None
    module.weight.requires_grad_(True)
    linear_cross_entropy(hidden, head, labels).sum().backward()
    assert error(module.weight.grad, gradients(whole_loss(hidden, module, labels).sum(), module.weight)[0]) < 1e-6


def test_the_backward_pass_has_the_autocast_of_the_forward_pass() -> None:
    hidden, head, labels = drawn()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cross_entropy(hidden, head, labels, chunk=CHUNK).sum()
        whole = whole_loss(hidden, head, labels).sum()  # with the copy of the weight that has a gradient
    for got, expected in zip(
        gradients(found, hidden, head.weight), gradients(whole, hidden, head.weight), strict=True
    ):
        assert error(got, expected) < 4e-3
    assert error(found, whole) < 1e-6


class _WideHead(torch.nn.Linear):
    """A head that computes in float32 whatever is around it, as trainers of RL have it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def test_a_head_in_float32_has_gradients_in_float32_under_autocast() -> None:
    hidden, head, labels = drawn()
    wide = _WideHead(head.in_features, head.out_features, bias=False)
    wide.load_state_dict({"weight": head.weight.detach()})
    labels = labels.clamp(min=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_log_probs(hidden, Head(wide, chunk=CHUNK), labels)[0].sum()
        whole = torch.log_softmax(wide(hidden), -1).gather(-1, labels.unsqueeze(-1)).sum()
    both = (gradients(loss, hidden, wide.weight) for loss in (found, whole))
    for got, expected in zip(*both, strict=True):
        assert error(got, expected) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_that_does_not_train_hidden_states_gives_them_zeros(reduction: str) -> None:
    hidden, head, labels = drawn()
    head.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    leaf = hidden.detach().requires_grad_()
    torch.full((64, *hidden.shape), 7e5)  # what memory that is not written may hold
    linear_cross_entropy(leaf, Head(head, chunk=CHUNK), labels, reduction=reduction).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_what_would_not_be_trained_is_refused() -> None:
    hidden, head, labels = drawn()
    with pytest.raises(ValueError, match="pass the module itself, or parameters="):
        cross_entropy(hidden, lambda x: head(x), labels, chunk=CHUNK)
    loss = cross_entropy(hidden, lambda x: head(x), labels, chunk=CHUNK, parameters=[head.weight])
    with pytest.raises(ValueError, match=r"trained tensor \[67\] that is not among its parameters"):
        loss.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 0}, "chunk=0 is not valid"),
        ({"chunk": "8"}, "chunk='8' is not valid"),
        ({"reduction": "max"}, "use one of: none, sum, mean"),
        ({"softcap": 0.0}, "softcap=0.0 is not valid"),
        ({"z_loss": "much"}, "z_loss='much' is not valid"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 is not supported in chunks"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels \[3\] of torch.int64 do not go together"),
        ({"project": nn.Linear(WIDTH, 1).double(), "hidden": torch.ones(2, 25, WIDTH, 1)}, "do not go together"),
    ],
)
def test_arguments_that_are_not_valid_are_refused(changes: dict[str, Any], message: str) -> None:
    hidden, head, labels = drawn()
    arguments = {"hidden": hidden, "project": head, "labels": labels, "chunk": CHUNK, **changes}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments)


# -------------------------------------------------------------------------------------------- shares of a vocabulary


def _of_shares(rank: int) -> dict[str, tuple[float, ...]]:
    """Errors on this rank, with half of the vocabulary, against whole logits."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2 * VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(2 * VOCAB, (ROWS,))
    labels[::5] = -100
    upstream = torch.randn(2, ROWS, dtype=torch.float64)
    share = weight.detach()[rank * VOCAB : (rank + 1) * VOCAB].clone().requires_grad_()
    given: dict[str, Any] = {"chunk": CHUNK, "group": dist.group.WORLD, "parameters": [share], "softcap": 4.0}
    losses = cross_entropy(hidden, lambda x: x @ share.T, labels, z_loss=0.1, **given)
    sampled = log_probs_of(hidden, lambda x: x @ share.T, labels.clamp(min=0), **given)
    logits = 4.0 * torch.tanh(hidden @ weight.T / 4.0)
    log_p = logits.log_softmax(-1)
    counts = labels != -100
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    truth_losses = (0.1 * logits.logsumexp(-1) ** 2 - picked) * counts
    truth_sampled = picked, -(log_p.exp() * log_p).sum(-1)
    errors = {}
    none = cross_entropy(hidden[:0], lambda x: x @ share.T, labels[:0], **given).sum()
    errors["no rows"] = tuple(float(each.abs().sum()) for each in torch.autograd.grad(none, [hidden, share]))
    for name, found, truth in (
        ("losses", losses[None], truth_losses[None]),
        ("sampled", torch.stack(sampled), torch.stack(truth_sampled)),
    ):
        of_hidden, of_share = torch.autograd.grad((found * upstream[: len(found)]).sum(), [hidden, share])
        expected = torch.autograd.grad((truth * upstream[: len(found)]).sum(), [hidden, weight], retain_graph=True)
        dist.all_reduce(of_hidden)  # which is the head's affair
        errors[name] = (
            error(found, truth),
            error(of_hidden, expected[0]),
            error(of_share, expected[1][rank * VOCAB : (rank + 1) * VOCAB]),
        )
    return errors


def test_ranks_may_have_shares_of_the_vocabulary() -> None:
    for errors in run_ranks(_of_shares, 2):
        for name, of_it in errors.items():
            assert max(of_it) < 1e-12, name


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.02, "softcap": 3.0}])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("divisor", [1, 3000, torch.tensor(77_777.0)], ids=str)
def test_sums_compute_logits_once(
    divisor: float | Tensor, dtype: torch.dtype, bound: float, options: dict[str, float]
) -> None:
    hidden, head, labels = drawn(dtype)
    labels[labels == -100] = 5
    calls = 0

    def project(rows: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        logits: Tensor = head(rows)
        return logits

    how = {"chunk": CHUNK, "parameters": [*head.parameters()], "reduction": "sum", "divisor": divisor}
    found = cross_entropy(hidden, project, labels, **how, **options)
    whole = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    truth = whole_loss(whole[1], whole[0], labels, **options).sum() / divisor
    assert error(found, truth) < bound
    upstream = float(divisor) / 3  # large, as the loss is scaled in float16
    tensors = (hidden, head.weight, head.bias)
    of_whole = gradients(truth * upstream, whole[1], whole[0].weight, whole[0].bias)
    for _ in range(2):  # through a graph that is kept
        grads = torch.autograd.grad(found * upstream, tensors, retain_graph=True)
        assert all(error(got, expected) < bound for got, expected in zip(grads, of_whole, strict=True))
    assert calls == -(-ROWS // CHUNK)
    with torch.no_grad():
        assert error(cross_entropy(hidden, project, labels, **how, **options), truth) < bound


def test_a_mean_over_no_labels_has_no_gradient() -> None:
    hidden, head, labels = drawn()
    how = {"chunk": CHUNK, "reduction": "sum", "divisor": torch.tensor(0)}
    loss = cross_entropy(hidden, head, labels.fill_(-100), **how)
    assert loss.isnan()
    loss.backward()
    for each in (hidden, head.weight, head.bias):
        assert not each.grad.any()


def test_a_checkpoint_around_a_sum_computes_it_once_more() -> None:
    hidden, head, labels = drawn()
    runs = 0

    def loss_of(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return cross_entropy(x.tanh(), head, labels, chunk=CHUNK, reduction="mean")

    loss = torch.utils.checkpoint.checkpoint(loss_of, hidden, use_reentrant=False)
    assert runs == 1
    loss.backward()
    assert runs == 2
    truth = drawn()[0]
    expected = cross_entropy(truth.tanh(), head, labels, chunk=CHUNK, reduction="mean")
    assert error(hidden.grad, *gradients(expected, truth)) < 1e-6


def _of_units(rank: int) -> list[float | str]:
    """Errors with a head that is a unit of `fully_shard`, of ranks with unequal numbers of chunks; and a refusal."""
    from torch.distributed.fsdp import fully_shard

    found: list[float | str] = []
    for reduction in ("none", "sum"):
        whole, head, labels = drawn(seed=3)
        truth = gradients(whole_loss(whole.double(), copy.deepcopy(head).double(), labels).sum(), whole)
        expected = gradients(whole_loss(whole, head, labels).sum(), head.weight)
        unit = fully_shard(copy.deepcopy(head))
        mine = slice(0, 17) if rank else slice(17, None)
        hidden = whole.detach()[:, mine].requires_grad_()
        cross_entropy(hidden, unit, labels[:, mine], chunk=CHUNK, reduction=reduction).sum().backward()
        of_weight = unit.weight.grad.full_tensor() * dist.get_world_size()
        found += [error(hidden.grad, truth[0][:, mine]), error(of_weight, *expected)]
    unit.register_forward_hook(lambda module, args, logits: logits / 2)
    try:
        cross_entropy(hidden, unit, labels[:, mine], chunk=CHUNK)
    except ValueError as refusal:
        found.append(str(refusal))
    return found


def test_a_head_that_is_a_unit_of_fully_shard_gathers_its_weights_once_for_all_chunks() -> None:
    for *errors, refusal in run_ranks(_of_units, 2, timeout_s=60.0):
        assert len(errors) == 4
        assert max(errors) < 1e-5, errors
        assert "which would get losses in place of logits; remove it" in refusal


def test_a_loss_that_outlives_its_step_keeps_no_gradients() -> None:
    hidden, head, labels = drawn(rows=4000)
    with LiveBytes() as live:
        losses = []
        for _ in range(3):
            losses.append(cross_entropy(hidden, head, labels, chunk=CHUNK, reduction="mean"))
            losses[-1].backward()
        held = live.now
    assert held < 2 * (hidden.nbytes + head.weight.nbytes + head.bias.nbytes)


def test_logits_to_come_have_a_shape_and_can_leave_out_the_last_ones() -> None:
    hidden = torch.randn(2, 3, 4)
    logits = DeferredLogits(hidden, "refused", width=4).float()
    fewer = logits[..., :3]
    assert (logits.shape, fewer.shape, logits[..., :-2].shape) == ((2, 3, 4), (2, 3, 3), (2, 3, 2))
    assert torch.equal(fewer.after(lambda rows: 2 * rows)(hidden), 2 * hidden[..., :3])
    for read in (lambda: logits[:, 1:], lambda: logits[..., 1:], lambda: DeferredLogits(hidden, "refused").shape):
        with pytest.raises(ValueError, match="refused does more with its logits than scale or cap them"):
            read()


def test_logits_to_come_are_not_kept_by_the_function_to_them() -> None:
    """It is there as long as the loss is, through the whole backward pass."""
    logits = DeferredLogits(torch.ones(2, 3), "refused").float()
    hidden = weakref.ref(logits.hidden)
    to_logits = logits.after(lambda rows: 2 * rows)
    del logits
    assert hidden() is None
    assert torch.equal(to_logits(torch.ones(1, 3)), torch.full((1, 3), 2.0))
