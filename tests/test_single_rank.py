"""One rank without torch.distributed: the same interface, and what autograd expects of an operation."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from burst_plugin import (
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Keys,
    Mask,
    PerRow,
    Scores,
    Strategy,
    Topology,
    VirtualRing,
    burst_attention,
)
from tests.support.reference import Problem, reference, relative


@pytest.fixture
def cp() -> ContextParallel:
    return ContextParallel()


def test_one_rank_needs_no_group(cp: ContextParallel) -> None:
    problem = Problem.draw(16, (4, 2))
    x = torch.arange(16).view(1, 16)
    assert torch.equal(cp.unshard(cp.shard(x)), x)
    assert cp.positions(16).tolist() == list(range(16))
    out, lse = burst_attention(*problem[:3], cp, return_lse=True)
    assert relative(out, reference(problem, Causal()).out) < 1e-6
    assert lse.shape == (2, 4, 16)
    assert lse.dtype == torch.float32
    assert cp.traffic() == cp.expected_traffic() == {k: {"gather": 0, "reduce": 0} for k in ("intra", "inter")}
    assert cp.describe()["topology"].startswith("1x1")


def test_gradients_pass_gradcheck(cp: ContextParallel) -> None:
    q, k, v = (x[:1, :6, :, :3].clone().requires_grad_() for x in Problem.draw(6, (2, 1), dtype=torch.float64)[:3])
    assert torch.autograd.gradcheck(lambda *qkv: burst_attention(*qkv, cp), (q, k, v))


def test_softmax_scale_is_used(cp: ContextParallel) -> None:
    q, k, v = Problem.draw(8, (2, 2))[:3]
    scaled = burst_attention(q, k, v, cp, scores=Scores(scale=2 * 8**-0.5))
    assert torch.equal(scaled, burst_attention(q, k, v, cp, softmax_scale=2 * 8**-0.5))
    with pytest.raises(ValueError, match=r"got softmax_scale=2.0 and scores with scale=1.0, which mean the same"):
        burst_attention(q, k, v, cp, softmax_scale=2.0, scores=Scores(scale=1.0))
    torch.testing.assert_close(scaled, burst_attention(2 * q, k, v, cp))


def test_only_wanted_gradients_are_given(cp: ContextParallel) -> None:
    q, k, v = Problem.draw(8, (2, 2))[:3]
    k.requires_grad_()
    burst_attention(q, k, v, cp).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None


def test_no_grad_saves_nothing_and_lse_has_no_gradient(cp: ContextParallel) -> None:
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])
    with torch.no_grad():
        assert not burst_attention(q, k, v, cp).requires_grad
    _, lse = burst_attention(q, k, v, cp, return_lse=True)
    assert not lse.requires_grad


def test_second_derivatives_are_refused(cp: ContextParallel) -> None:
    """Also where nothing would ask for them: a penalty on a gradient would be dropped without a word."""
    q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])
    for loss in (burst_attention(q, k, v, cp).square().sum(), (burst_attention(q, k, v, cp) * 2.0).sum()):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, q, create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(cp: ContextParallel, reentrant: bool) -> None:
    grads = []
    for recompute in (False, True):
        q, k, v = (x.requires_grad_() for x in Problem.draw(8, (2, 2))[:3])

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return burst_attention(*qkv, cp).square()

        out = checkpoint(attend, q, k, v, use_reentrant=reentrant) if recompute else attend(q, k, v)
        out.sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


def test_a_model_with_a_ring_can_be_copied_but_not_saved_whole(cp: ContextParallel) -> None:
    """Copied for a moving average of its weights, or as the reference of a preference loss."""
    model = torch.nn.Linear(2, 2)
    model.cp = cp  # type: ignore[assignment]
    assert copy.deepcopy(model).cp is cp
    with pytest.raises(TypeError, match=r"a ContextParallel cannot be saved .*state_dict\(\)"):
        pickle.dumps(model)


def test_a_dtensor_is_refused_before_its_global_shape_is_taken_for_a_local_one(cp: ContextParallel) -> None:
    class Distributed(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    q, k, v = Problem.draw(8, (2, 2))[:3]
    burst_attention(q, k, v, cp)  # a call that is like the next one, but for that
    with pytest.raises(ValueError, match=r"k is a Distributed; pass k\.to_local\(\), what this rank holds"):
        burst_attention(q, k.as_subclass(Distributed), v, cp)
    with pytest.raises(ValueError, match=r"sink is a Distributed; pass sink\.to_local\(\)"):
        burst_attention(q, k, v, cp, sink=torch.zeros(2).as_subclass(Distributed))


def test_seeds_are_integers() -> None:
    assert Scores(seed=torch.tensor(7)) == Scores(seed=7)
    with pytest.raises(ValueError, match=r"Scores\(seed=1\.5\) is not valid; use an integer"):
        Scores(seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mask",
    [PerRow([Documents((0, 5, 8)), Documents([0, 8])]), Keys([[0, 5]]), BlockMask(4, [[True, False], [True, True]])],  # type: ignore[arg-type, list-item]
    ids=lambda mask: type(mask).__name__,
)
def test_masks_may_be_made_of_lists(cp: ContextParallel, mask: Mask) -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in Problem.draw(8, (2, 2))[:3])
    burst_attention(q, k, v, cp, mask=mask)


def test_many_microbatches_may_await_their_backward_pass(cp: ContextParallel) -> None:
    problems = [Problem.draw(8, (2, 2), seed=seed) for seed in range(3)]
    outs = []
    for problem in problems:
        q, k, v = (x.requires_grad_() for x in problem[:3])
        outs.append(burst_attention(q, k, v, cp))
    for out, problem in reversed(list(zip(outs, problems, strict=True))):
        out.backward(problem.dout)
        truth = reference(problem, Causal())
        for x, grad in zip(problem[:3], truth[1:4], strict=True):
            assert relative(x.grad, grad) < 2e-6


def test_unshard_refuses_to_lose_a_gradient(cp: ContextParallel) -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"unshard has no gradient; .*x\.detach\(\)"):
        cp.unshard(x)
    with torch.no_grad():
        cp.unshard(x)


def test_entering_twice_at_once_is_refused(cp: ContextParallel) -> None:
    with (
        cp.rank_state.exclusive(torch.device("cpu")),
        pytest.raises(RuntimeError, match="while another of its passes"),
    ):
        burst_attention(*Problem.draw(8, (2, 2))[:3], cp)


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="use one of: zigzag, striped, contiguous"):
        ContextParallel(layout="spiral")
    with pytest.raises(ValueError, match="got strategy= and also backward"):
        ContextParallel(strategy=Strategy(), backward="q")
    with pytest.raises(ValueError, match="multiplies to 4"):
        ContextParallel(hierarchy=[2, 2])


def test_what_is_not_a_mask_is_refused(cp: ContextParallel) -> None:
    with pytest.raises(ValueError, match=r"mask='causal' is not a mask; use one of the masks of burst_plugin"):
        burst_attention(*Problem.draw(8, (2, 2))[:3], cp, mask="causal")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape"), [("sink", (2,)), ("bias", (1, 1, 8, 8))])
def test_sink_and_bias_are_floating_point(cp: ContextParallel, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be floating point .*, got torch.int64"):
        burst_attention(*Problem.draw(8, (2, 2))[:3], cp, **{name: torch.zeros(shape, dtype=torch.int64)})


@pytest.mark.parametrize(("name", "shape"), [("sink", (2,)), ("bias", (1, 1, 8, 8))])
def test_sink_and_bias_are_where_the_queries_are(cp: ContextParallel, name: str, shape: tuple[int, ...]) -> None:
    elsewhere = {name: torch.zeros(shape, device="meta")}
    with pytest.raises(ValueError, match=f"{name} is on meta, but q, k, v are on cpu"):
        burst_attention(*Problem.draw(8, (2, 2))[:3], cp, **elsewhere)


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("kernel", ["torch_cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_into_the_sums(dtype: torch.dtype, kernel: str, backward: str) -> None:
    problem = Problem.draw(64, (4, 2), dtype=dtype)
    results = []
    for enabled in (False, True):
        ring = VirtualRing(Topology(2, 2), Strategy(kernel=kernel, backward=backward))
        q, k, v = (x.clone().requires_grad_() for x in problem[:3])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = ring.attention(q, k, v)
            results.append((out, *torch.autograd.grad(out, (q, k, v), problem.dout)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("forward", ["q", "kv"])
def test_the_output_owns_its_memory(forward: str) -> None:
    q, k, v = (x.requires_grad_() for x in Problem.draw(16, (2, 2))[:3])
    out = burst_attention(q, k, v, ContextParallel(strategy=Strategy(forward=forward)), return_lse=True)
    for tensor in out:
        assert tensor._base is None
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def _saved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """What a call keeps for its backward pass."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        burst_attention(q, k, v, ContextParallel())
    return saved


@pytest.mark.parametrize("rotated", [True, False])
def test_views_of_one_projection_do_not_keep_what_is_not_needed(rotated: bool) -> None:
    """Rotary embedding makes new queries and keys; the values are a view of all three still."""
    mixed = torch.randn(1, 16, 8, 24, requires_grad=True) * 2
    q, k, v = mixed.split(8, dim=3)
    q, k = (q * 2, k * 2) if rotated else (q, k)
    saved = _saved(q, k, v)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert sum(held.values()) == sum(x.nbytes for x in saved)
    assert (mixed.untyped_storage().data_ptr() in held) != rotated, "nothing is copied that is needed whole"


_PROBE = """
import os, sys
import torch
before = set(sys.modules)
class Watch(dict):
    pass
read = []
environ = type(os.environ)
original = environ.__getitem__
environ.__getitem__ = lambda self, key: (read.append(key), original(self, key))[1]
import burst_plugin, burst_plugin.megatron
import burst_plugin.megatron.cpu
environ.__getitem__ = original
frameworks = {"megatron", "deepspeed", "transformers", "accelerate", "flash_attn", "triton", "matplotlib", "rich"}
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & frameworks), read)
"""


def test_import_loads_no_framework_and_reads_no_environment() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_import_takes_less_than_a_twenty_fifth_of_torchs_own() -> None:
    """With compiled bytecode at hand, as after the first import. That is 40 ms where torch takes a second.

    Garbage is not collected meanwhile: going through all that torch has imported takes 0.1 s, in whichever import.
    """
    code = (
        "import gc; gc.disable(); from time import process_time as now; a = now(); import torch; b = now(); "
        "import burst_plugin; print((now() - b) / (b - a))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return float(done.stdout)

    assert min(once() for _ in range(5)) < 0.04
