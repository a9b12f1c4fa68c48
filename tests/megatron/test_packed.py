"""Megatron's packed sequences as tokens and documents; and what is remembered of tensors, by models too."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from burst_plugin import Strategy
from burst_plugin.megatron import packed_indices
from burst_plugin.megatron.batches.packed import packed_documents
from burst_plugin.megatron.registry import TensorCache
from burst_plugin.sequence.layout import Tokens
from tests.support.megatron_gpt import GptRun, _gpt_model, build, random_tokens, set_weights, transformer_config
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_indices_deal_out_every_document_in_zigzag(ranks: int) -> None:
    starts = [0, 2 * ranks, 2 * ranks, 8 * ranks]
    assigned = []
    for rank in range(ranks):
        expected = []
        for start, stop in ((0, 2 * ranks), (2 * ranks, 8 * ranks)):
            chunk = (stop - start) // (2 * ranks)
            for number in (rank, 2 * ranks - 1 - rank):
                expected += range(start + number * chunk, start + (number + 1) * chunk)
        for given in (starts, torch.tensor(starts), torch.tensor([starts])):
            assert packed_indices(given, ranks, rank).tolist() == expected
        assigned += expected
    assert sorted(assigned) == list(range(8 * ranks))


def _packed(**tensors: list[int]) -> PackedSeqParams:
    return PackedSeqParams("thd", **{name: torch.tensor(x) for name, x in tensors.items()})


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (_packed(), "packed_seq_params.cu_seqlens_q is None"),
        (_packed(cu_seqlens_q=[0, 6, 8]), "packed document 0 has 6 tokens, expected a multiple of 2"),
        (_packed(cu_seqlens_q=[0, 8, 4]), "cu_seqlens must not decrease"),
        (_packed(cu_seqlens_q=[0, 0]), "cu_seqlens_q ends at 0"),
        (_packed(cu_seqlens_q=[0, 4], cu_seqlens_q_padded=[0, 4, 8]), "has 1 documents and cu_seqlens_q_padded 2"),
        (_packed(cu_seqlens_q=[0, 5], cu_seqlens_q_padded=[0, 4]), "do not fit into documents of"),
        (
            _packed(cu_seqlens_q=[0, 4, 8]),
            "end at token 8, but there are 4, 2 on each of 2 ranks",
        ),
    ],
)
def test_packed_sequences_that_do_not_fit_are_refused(params: PackedSeqParams, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        packed_documents(params, 2, (2, 2), lambda tensor: tensor.tolist())


def test_a_packed_batch_that_is_not_cut_is_told_so() -> None:
    """Not to end the offsets at twice as many tokens: every rank would then have the same half."""
    with pytest.raises(ValueError, match="the batch is not cut over the 2 context-parallel ranks"):
        packed_documents(_packed(cu_seqlens_q=[0, 4, 8]), 2, (8, 8), lambda tensor: tensor.tolist())


def test_documents_longer_than_max_seqlen_are_refused() -> None:
    """Their later tokens would have the position of the last one for which there is a rotary embedding."""

    def documents(longest: object) -> None:
        params = _packed(cu_seqlens_q=[0, 5, 7], cu_seqlens_q_padded=[0, 8, 12])
        params.max_seqlen_q = params.max_seqlen_kv = longest  # type: ignore[assignment]
        packed_documents(params, 2, (6, 6), lambda tensor: tensor.flatten().tolist())

    for longest in (4, torch.tensor(4), torch.tensor([4])):
        with pytest.raises(ValueError, match="max_seqlen_kv=4, but its longest document has 5 tokens"):
            documents(longest)
    for longest in (5, 6, torch.tensor(8), None):  # padding needs no positions
        documents(longest)


def test_documents_of_queries_and_keys() -> None:
    params = _packed(cu_seqlens_q=[0, 3, 7], cu_seqlens_q_padded=[0, 4, 8], cu_seqlens_kv=[0, 8, 12])
    (q, kv), documents = packed_documents(params, 2, (4, 6), lambda tensor: tensor.tolist())
    assert (q, kv) == (Tokens(8, (0, 4, 8)), Tokens(12, (0, 8, 12)))
    assert (documents.lengths, documents.kv_cu_seqlens, documents.kv_lengths) == ((3, 4), (0, 8, 12), None)
    (q, kv), documents = packed_documents(_packed(cu_seqlens_q=[0, 8]), 2, (4, 4), lambda tensor: tensor.tolist())
    assert q == kv
    assert documents.kv_cu_seqlens is None


def test_tensors_are_read_once_while_they_live_unchanged() -> None:
    seen, reads = TensorCache(), []

    def read(x: torch.Tensor, layer: int = 2) -> list[int]:
        return seen.get(x, "numbers", lambda: reads.append(1) or x.tolist(), layer)

    x = torch.arange(4)
    assert read(x, layer=1) == read(x.detach()) == [0, 1, 2, 3]
    assert len(reads) == 1
    assert read(x[1:]) == [1, 2, 3]  # another part of the same memory
    assert seen.get(x, "length", lambda: 4, 1) == 4
    x[0] = 7
    assert read(x) == [7, 1, 2, 3]
    assert len(reads) == 3
    del x
    gc.collect()
    assert seen.count == 0
    for n in range(20):  # memory and numbers of objects are used again
        assert read(torch.tensor([n])) == [n]


def test_a_buffer_that_is_kept_for_all_microbatches_is_read_once_for_each() -> None:
    """Torch does not see NumPy's writes, nor those of collectives; three layers ask in every microbatch."""
    numbers, seen, reads = numpy.arange(3), TensorCache(), []
    kept = torch.from_numpy(numbers)
    for first in (0, 5, 9):
        numbers[:] = numpy.arange(3) + first
        version = kept._version
        found = [seen.get(kept, "numbers", lambda: reads.append(1) or kept.tolist(), layer) for layer in (1, 2, 3)]
        assert kept._version == version
        assert found == [list(range(first, first + 3))] * 3
    assert len(reads) == 3


def test_a_buffer_is_read_again_for_every_model_and_microbatch() -> None:
    """A student asks after its teacher, or is called alone for the next microbatch; also where a call counts."""
    numbers, calls, reads = numpy.arange(3), [0], []
    kept = torch.from_numpy(numbers)
    seen = TensorCache(lambda: calls[0])

    def read(layer: int) -> list[int]:
        return seen.get(kept, "numbers", lambda: reads.append(1) or kept.tolist(), layer)

    assert read(1) == read(2) == read(3) == [0, 1, 2]  # a teacher's layers, and a student's
    assert len(reads) == 1
    numbers[:] += 5
    assert read(2) == read(3) == [5, 6, 7]
    numbers[:] += 1
    calls[0] += 1
    assert read(4) == read(5) == [6, 7, 8]  # of a model that has not asked before
    assert read(5) == read(4) == [6, 7, 8]  # recomputation
    assert len(reads) == 4


DOCUMENTS = ([0, 16, 40, 48], [0, 24, 32, 48])


def _in_one_buffer(rank: int, layout: str) -> list[float]:
    """Return how far gradients of a student are from those with offsets of its own, without a schedule."""
    run = GptRun(
        layers=1, cp=2, cp_comm_type="burst", seq_length=48, microbatch_size=1, strategy=Strategy(layout=layout)
    )
    student = build(run)
    teacher = _gpt_model(run, transformer_config(run))
    set_weights(teacher, run)
    tokens = random_tokens(run)[0]
    buffer = torch.tensor(DOCUMENTS[0], dtype=torch.int32)

    def call(model: Any, offsets: torch.Tensor) -> Any:
        rows = packed_indices(offsets, 2, rank)
        mine, labels, at = (x.index_select(1, rows) for x in (tokens[:, :-1], tokens[:, 1:], torch.arange(48)[None]))
        params = PackedSeqParams("thd", offsets, offsets, offsets, offsets, 24, 24)
        return model(mine, at, None, labels=labels, packed_seq_params=params)

    def gradients(offsets: torch.Tensor) -> torch.Tensor:
        student.zero_grad_buffer()
        call(student, offsets).sum().backward()
        return torch.cat([x.main_grad.flatten() for x in student.parameters()])

    def write(number: int) -> None:
        buffer.numpy()[:] = DOCUMENTS[number]

    expected = [gradients(torch.tensor(x, dtype=torch.int32)) for x in DOCUMENTS]
    call(teacher, buffer)
    found = [(gradients(buffer), expected[0])]
    write(1)
    found.append((gradients(buffer), expected[1]))
    call(teacher, buffer)
    write(0)
    found.append((gradients(buffer), expected[0]))
    return [((a - b).norm() / b.norm()).item() for a, b in found]


@pytest.mark.parametrize("layout", ["zigzag", "striped", "auto"])
def test_models_follow_a_buffer_of_offsets_without_a_schedule(layout: str) -> None:
    for errors in run_ranks(_in_one_buffer, 2, layout):
        assert max(errors) < 1e-6
