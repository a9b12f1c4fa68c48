"""Both passes on a GPU that is not there, around PyTorch's kernels: nothing is on two devices, or of another shape.

Without autograd, NCCL and the libraries that are not PyTorch's. What kernels compute is in test_kernels.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    burst_attention,
    key_padding,
)
from burst_plugin.comm.copies import CopyNetwork
from burst_plugin.ring.request import Inputs
from burst_plugin.virtual import VirtualRingAttention
from tests.support.fake_gpu import GPU, Launches, fake_gpu
from tests.support.ring_memory import Pass

SEQ = 512
TWO_NODES, CAUSAL, PLAIN = Topology(2, 2), Causal(), Scores()
DOCUMENTS = (0, 100, 104, 512)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one rank": {"topology": Topology(1, 1)},
    "eight ranks": {"topology": Topology(1, 8)},
    "queries travel": {"backward": "q"},
    "queries travel, float16": {"backward": "q", "dtype": torch.float16},
    "queries travel forward": {"forward": "q", "backward": "q"},
    "heads exchanged": {"ulysses_degree": 2},
    "heads exchanged by all": {"ulysses_degree": 4},
    "one key head": {"ulysses_degree": 2, "heads": (8, 1)},
    "parts": {"parts": 2},
    "direct": {"schedule": "direct"},
    "window": {"mask": SlidingWindow(50)},
    "documents": {"mask": Causal() & Documents(DOCUMENTS)},
    "documents, each over all ranks": {"mask": Causal() & Documents(DOCUMENTS), "tokens": Tokens(SEQ, DOCUMENTS)},
    "spans": {"mask": BidirectionalSpans(tuple((n, n + 20) for n in range(0, 480, 40)))},
    "spans of one group": {"mask": BidirectionalSpans(tuple((n, n + 20) for n in range(0, 480, 40)), (0,) * 12)},
    "blocks": {"mask": BlockMask.of(torch.eye(8, dtype=torch.bool), SEQ // 8)},
    "padding": {"mask": Causal() & key_padding(torch.arange(SEQ).expand(2, SEQ) >= torch.tensor([[0], [70]]))},
    "cross": {"mask": Full(), "kv_seq": 256},
    "uneven": {"seq": 500, "kv_seq": 500},
    "sinks": {"sink": True},
    "dims": {"dims": (96, 64)},
    "deterministic": {"deterministic": True},
    "float32": {"dtype": torch.float32},
    "bias": {"bias": True},
    "alibi": {"scores": Scores(alibi_slopes=tuple(0.1 * n for n in range(8)))},
    "dropout": {"scores": Scores(dropout=0.1, seed=3)},
    "softcap": {"scores": Scores(softcap=5.0)},
}
_REFERENCE_ONLY = ("alibi", "dropout", "softcap")
LACKING: dict[str, tuple[str, ...]] = {
    "reference": (),
    "torch_flash": (*_REFERENCE_ONLY, "bias", "float32"),
    "torch_cudnn": (*_REFERENCE_ONLY, "bias", "float32", "deterministic"),
    "torch_efficient": _REFERENCE_ONLY,
}


def _run(
    kernel: str,
    *,
    topology: Topology = TWO_NODES,
    mask: Mask = CAUSAL,
    scores: Scores = PLAIN,
    seq: int = SEQ,
    kv_seq: int = SEQ,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    sink: bool = False,
    bias: bool = False,
    tokens: Tokens | None = None,
    **options: Any,
) -> Launches:
    """Both passes; out and gradients have to be those of the inputs in shape, type and place."""
    (heads_q, heads_kv), (qk_dim, v_dim) = heads, dims
    done = Pass()
    with fake_gpu() as launches, mock.patch.object(VirtualRingAttention, "apply", done.apply):
        shapes = (2, seq, heads_q, qk_dim), (2, kv_seq, heads_kv, qk_dim), (2, kv_seq, heads_kv, v_dim)
        q, k, v = (torch.empty(shape, dtype=dtype, device=GPU) for shape in shapes)
        extras = {
            "sink": torch.empty(heads_q, device=GPU) if sink else None,
            "bias": torch.empty(1, heads_q, seq, kv_seq, device=GPU) if bias else None,
        }
        network = CopyNetwork(topology.ranks, GPU)
        ring = VirtualRing(topology, Strategy(kernel=kernel, **options), network=network)
        out, lse = ring.attention(q, k, v, mask=mask, scores=scores, tokens=tokens, **extras)
        assert (out.device, out.dtype, out.shape) == (GPU, dtype, (*q.shape[:3], v_dim))
        assert (lse.device, lse.dtype, lse.shape) == (GPU, torch.float32, (2, heads_q, seq))
        count = len(Inputs._fields)
        of_ranks = [done.saved_tensors[n : n + count + 2] for n in range(0, len(done.saved_tensors), count + 2)]
        assert len(of_ranks) == topology.ranks
        douts: list[Tensor | None] = []
        for saved in of_ranks:
            assert saved[count] is not None
            rows = (
                saved[count].shape[1] // ring.rank_states[0].group.head_shares
            )  # those of the group are together here
            douts += [torch.empty(2, rows, heads_q, v_dim, dtype=dtype, device=GPU), None, None]
        grads = VirtualRingAttention.backward(done, *douts)[2:]
    assert len(grads) == count * topology.ranks
    for n, grad in enumerate(grads):
        assert (grad is None) == ([True, True, True, sink, bias, False, False][n % count] is False)
        if grad is not None:
            assert grad.device == GPU
            assert n % count > 2 or (grad.dtype, grad.shape[0], *grad.shape[2:]) == (dtype, 2, *shapes[n % count][2:])
    for n, shape in enumerate(shapes):  # of dq, dk, dv all ranks together have every row
        assert sum(grad.shape[1] for grad in grads[n::count] if grad is not None) == shape[1]
    assert all(grad.shape == (heads_q,) for grad in grads[3::count] if grad is not None)
    return launches


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(kernel, case) for kernel, lacking in LACKING.items() for case in CASES if case not in lacking],
)
def test_everything_is_on_the_gpu_and_of_the_right_shape(kernel: str, case: str) -> None:
    launches = _run(kernel, **CASES[case])
    one_visit = case in ("one rank", "heads exchanged by all")
    assert bool(launches.additions) != one_visit, "gradients of several visits are added up there"


@pytest.mark.parametrize(("kernel", "case"), [(kernel, case) for kernel in LACKING for case in LACKING[kernel]])
def test_what_a_kernel_lacks_is_refused(kernel: str, case: str) -> None:
    with pytest.raises(ValueError, match=f"kernel='{kernel}' cannot do this attention"):
        _run(kernel, **CASES[case])


@pytest.mark.parametrize("kernel", LACKING)
def test_lse_and_largest_scores_are_on_the_gpu(kernel: str) -> None:
    done = Pass()
    with fake_gpu(), mock.patch.object(VirtualRingAttention, "apply", done.apply):
        q, k, v = (torch.empty(2, SEQ, heads, 64, dtype=torch.bfloat16, device=GPU) for heads in (8, 2, 2))
        cp = ContextParallel(kernel=kernel)
        found = burst_attention(q, k, v, cp, return_lse=True, return_max_logits=True)
        assert [x.shape for x in found] == [q.shape, (2, 8, SEQ), (8,)]
        assert [x.device for x in found] == [GPU] * 3


def test_results_are_summed_up_several_at_a_time() -> None:
    """Of eight visits the first four, and then the other four with the sum so far, on each of eight ranks."""
    launches = _run("torch_flash", topology=Topology(1, 8), mask=Full(), backward="kv")
    assert sorted(launches.merges) == [4] * 8 + [5] * 8
    assert [n for n in sorted(launches.additions) if n > 2] == [4] * 8 + [5] * 8, "dq; dk and dv travel"
