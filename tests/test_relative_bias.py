"""Attention with a bias by distance on a ring, beside its definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import ContextParallel
from burst_plugin.relative_bias import relative_attention
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Documents, Keys
from burst_plugin.sequence.prefix_tree import PrefixTree
from tests.support.ranks import run_ranks

_LENGTH, _SCALE = 48, 0.3


class _Case(NamedTuple):
    extent: int
    window: int | None = None
    documents: tuple[int, ...] = (0, _LENGTH)
    has_sink: bool = True


CASES = (
    _Case(5),
    _Case(5, 9),
    _Case(5, 5, has_sink=False),
    _Case(7, 3),
    _Case(60),
    _Case(5, documents=(0, 3, 4, 20, 21, _LENGTH)),
    _Case(1, documents=(0, 10, _LENGTH)),
    _Case(20, 20, (0, 30, _LENGTH)),
    _Case(16, documents=(0, 24, _LENGTH)),
)


def _drawn(case: _Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return q, k, v, relative and a sink, [2, S, ...] each; the profiles; and the gradient of out."""
    generator = torch.Generator().manual_seed(case.extent)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    of_tokens = [draw(2, _LENGTH, *shape) for shape in ((4, 8), (2, 8), (2, 6), (4, 3), (4,), (4, 6))]
    *tensors, dout = of_tokens
    return tensors, draw(3, case.extent), dout


def _defined(
    case: _Case, q: Tensor, k: Tensor, v: Tensor, relative: Tensor, sink: Tensor, profiles: Tensor
) -> Tensor:
    """Return attention by its definition, with scores and biases of all tokens to all."""
    heads, length = q.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    at = torch.arange(length)
    distance = at[:, None] - at[None]
    biases = (relative @ profiles).transpose(1, 2)
    biases = biases.gather(3, distance.clamp(0, case.extent - 1).expand(*biases.shape[:2], -1, -1))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * _SCALE
    scores = scores + biases.masked_fill((distance < 0) | (distance >= case.extent), 0)
    document = torch.bucketize(at, torch.tensor(case.documents[1:]), right=True)
    unseen = (distance < 0) | (document[:, None] != document[None])
    if case.window is not None:
        unseen |= distance >= case.window
    scores = scores.masked_fill(unseen, -torch.inf)
    if case.has_sink:
        scores = torch.cat([scores, sink.transpose(1, 2).unsqueeze(3)], 3)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(3)[..., :length], v)


def _on_ring(rank: int, layout: str) -> list[list[Tensor]]:
    """Return out and all gradients of each case, of whole sequences."""
    cp, results = ContextParallel(dist.group.WORLD, layout=layout), []
    for case in CASES:
        tensors, profiles, dout = _drawn(case)
        q, k, v, relative, sink = (cp.shard(x, 1).requires_grad_() for x in tensors)
        out = relative_attention(
            *(q, k, v, relative, profiles.requires_grad_(), cp),
            mask=None if len(case.documents) == 2 else Documents(case.documents),
            scale=_SCALE,
            window=case.window,
            sink=sink if case.has_sink else None,
        )
        inputs = [q, k, v, relative, *([sink] if case.has_sink else []), profiles]
        grads = torch.autograd.grad(out, inputs, cp.shard(dout, 1))
        dist.all_reduce(grads[-1])
        results.append([*(cp.unshard(x.detach(), 1) for x in (out, *grads[:-1])), grads[-1]])
    return results


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_outputs_and_gradients_equal_the_definition(ranks: int, layout: str) -> None:
    for case, results in zip(CASES, run_ranks(_on_ring, ranks, layout)[0], strict=True):
        tensors, profiles, dout = _drawn(case)
        inputs = [x.requires_grad_() for x in (*tensors, profiles)]
        out = _defined(case, *inputs)
        used = [x for n, x in enumerate(inputs) if case.has_sink or n != 4]
        for result, truth in zip(results, (out, *torch.autograd.grad(out, used, dout)), strict=True):
            assert float((result - truth.detach()).norm()) <= 1e-13 * float(truth.detach().norm()), case


def _on_a_rank_without_tokens(rank: int) -> list[Tensor]:
    """Return the sums over ranks of the gradients of all tensors, of 3 tokens on 4 ranks."""
    cp, tokens = ContextParallel(dist.group.WORLD), Tokens(3)
    (q, k, v, relative, sink), profiles, _ = _drawn(_Case(2))
    local = [cp.shard(x[:, :3], 1, tokens).requires_grad_() for x in (q, k, v, relative, sink)]
    inputs = [*local, profiles.requires_grad_()]
    out = relative_attention(*inputs[:4], profiles, cp, tokens=tokens, scale=_SCALE, sink=inputs[4])
    *grads, of_profiles = torch.autograd.grad(out.square().sum(), inputs)
    dist.all_reduce(of_profiles)
    return [*(cp.unshard(x, 1, tokens) for x in grads), of_profiles]


def test_ranks_without_tokens_have_gradients() -> None:
    case = _Case(2, documents=(0, 3))
    tensors, profiles, _ = _drawn(case)
    inputs = [x.requires_grad_() for x in (*(x[:, :3] for x in tensors), profiles)]
    truth = torch.autograd.grad(_defined(case, *inputs).square().sum(), inputs)
    for grads in run_ranks(_on_a_rank_without_tokens, 4):
        torch.testing.assert_close(grads, list(truth), rtol=1e-12, atol=1e-12)


def test_bands_of_many_chunks_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, too, whose scores are float32."""
    monkeypatch.setattr("burst_plugin.relative_bias.QUERIES_AT_ONCE", 7)
    monkeypatch.setattr("burst_plugin.relative_bias.BYTES_AT_ONCE", 4000)
    cp = ContextParallel()
    for dtype, bound in ((torch.float64, 1e-13), (torch.bfloat16, 6e-3)):
        for case in CASES:
            tensors, profiles, dout = _drawn(case, dtype)
            inputs = [x.requires_grad_() for x in (*tensors, profiles)]
            q, k, v, relative, sink, _ = inputs
            mask = None if len(case.documents) == 2 else Documents(case.documents)
            sinks = sink if case.has_sink else None
            terms: dict[str, Any] = {"mask": mask, "scale": _SCALE, "window": case.window, "sink": sinks}
            out = relative_attention(q, k, v, relative, profiles, cp, **terms)
            assert out.dtype is dtype
            used = [x for n, x in enumerate(inputs) if case.has_sink or n != 4]
            exact = [x.detach().double().requires_grad_() for x in inputs]
            truth = _defined(case, *exact)
            used_exact = [x for n, x in enumerate(exact) if case.has_sink or n != 4]
            grads, true_grads = (
                torch.autograd.grad(x, of, dout.to(x.dtype)) for x, of in ((out, used), (truth, used_exact))
            )
            for result, true in zip((out, *grads), (truth, *true_grads), strict=True):
                assert float((result.double() - true).detach().norm()) <= bound * float(true.detach().norm()), (
                    dtype,
                    case,
                )


def _refused(rank: int) -> list[str]:
    cp = ContextParallel(dist.group.WORLD)
    striped = ContextParallel(dist.group.WORLD, layout="striped")
    (q, k, v, relative, sink), profiles, _ = _drawn(_Case(5))
    tree = PrefixTree((-1, 0, 0), (8, 8, _LENGTH - 16))

    def problems() -> Iterator[str]:
        calls: list[tuple[ContextParallel, dict[str, Any]]] = [
            (striped, {}),
            (cp, {"mask": tree}),
            (cp, {"mask": Keys(((0, 9), (12, _LENGTH)))}),
            (cp, {"window": 0}),
            (cp, {"profiles": profiles[:2]}),
            (cp, {"sink": sink[..., :2]}),
            (cp, {"profiles": profiles if rank else profiles[:, :4]}),
            (cp, {"types": (torch.float64, torch.float32 if rank else torch.float64)}),
        ]
        for ring, changes in calls:
            given: dict[str, Any] = {"profiles": profiles, **changes}
            of_q, of_k = given.pop("types", (q.dtype, k.dtype))
            tensors = [ring.shard(x, 1).to(dtype) for x, dtype in ((q, of_q), (k, of_k), (v, of_k), (relative, of_q))]
            if "sink" in given:
                given["sink"] = ring.shard(given["sink"], 1)
            with pytest.raises(ValueError, match=r".") as error:
                relative_attention(*tensors, given.pop("profiles"), ring, **given)
            yield str(error.value)

    return list(problems())


def test_what_it_cannot_compute_is_refused_on_every_rank() -> None:
    expected = ("use layout='zigzag'", "prefix tree", "padding", "window=0", "relative does not fit", "sink does not")
    for problems in run_ranks(_refused, 2):
        for problem, part in zip(problems, (*expected, "profiles", "types=["), strict=True):
            assert part in problem
