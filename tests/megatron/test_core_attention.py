"""The core attention by itself: biases, mask tensors, other lengths of keys, seeds of dropout, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from burst_plugin import Causal, ContextParallel, key_padding
from burst_plugin.megatron import packed_indices
from burst_plugin.megatron.batches.packed import check_known
from burst_plugin.megatron.layers import masks
from burst_plugin.sequence.layout import LAYOUTS, Tokens
from burst_plugin.sequence.mask import allowed
from tests.support.core_attentions import allowed_pairs
from tests.support.megatron_gpt import GptRun, batches, build, forward_step, random_tokens
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron

RUN = GptRun(layers=2, cp=4, hierarchical=(2, 2), cp_comm_type="burst")
S, SK, B, HEADS, GROUPS, DIM = 32, 48, 2, 8, 4, 8
Beside = list[tuple[torch.Tensor, torch.Tensor]]  # what was found, and what is defined


def _cut(x: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a whole tensor, as Megatron cuts it."""
    return LAYOUTS["zigzag"].shard(x, dim, (rank, ranks), Tokens(x.shape[dim]))


def _tensors(keys: int = S) -> list[torch.Tensor]:
    """q, k, v, and the gradient of out, whole, in Megatron's order [S, B, H, D]."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((S, B, HEADS, DIM), (keys, B, GROUPS, DIM), (keys, B, GROUPS, DIM), (S, B, HEADS * DIM))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention with a bias [B, H, S, Sk], in float64."""
    k, v = (x.double().repeat_interleave(HEADS // GROUPS, dim=2) for x in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q.double(), k) * DIM**-0.5 + bias
    dead = (bias == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return torch.einsum("bhij,jbhd->ibhd", p, v).flatten(2)


def _compare(
    rank: int,
    whole: list[torch.Tensor],
    bias: torch.Tensor,
    live: torch.Tensor | None,
    call: Callable[..., torch.Tensor],
) -> Beside:
    """Return what `call(q, k, v)` gives on this rank's tensors beside the definition: out, then gradients."""
    q, k, v, dout = whole
    if live is not None:  # queries of which the output is not read
        dout = dout * live.t().unsqueeze(-1)
    reference = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _defined(*reference, bias)
    expected.backward(dout.double())
    local = [_cut(x, 0, rank, 4).requires_grad_() for x in (q, k, v)]
    out = call(*local)
    out.backward(_cut(dout, 0, rank, 4))
    read = torch.ones(S, B) if live is None else live.t()
    got, wanted = (_cut(x.detach().float() * read.unsqueeze(-1), 0, rank, 4) for x in (_whole(out, rank), expected))
    grads = [(x.grad, _cut(y.grad, 0, rank, 4).float()) for x, y in zip(local, reference, strict=True)]
    return [(got, wanted), *grads]


def _check_close(ranks: list[list[Beside]], calls: int) -> None:
    """Of every rank's calls, out and gradients are those of the definition."""
    for of_rank in ranks:
        assert len(of_rank) == calls
        for out, *grads in of_rank:
            torch.testing.assert_close(*out)
            for grad in grads:
                torch.testing.assert_close(*grad, rtol=1e-4, atol=1e-5)


def _whole(out: torch.Tensor, rank: int) -> torch.Tensor:
    """A whole tensor that has this rank's rows and nothing else."""
    full = torch.zeros(out.shape[0] * 4, *out.shape[1:])
    rows = torch.cat([torch.arange(r.start, r.start + r.length) for r in LAYOUTS["zigzag"].runs(rank, 4, Tokens(S))])
    full[rows] = out.detach()
    return full


def _core(run: GptRun = RUN) -> Any:
    return build(run).module.decoder.layers[0].self_attention.core_attention


def _added(allowed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)


# ------------------------------------------------------------------------------------------------- biases and masks


def _bias(rank: int) -> list[Beside]:
    core, whole = _core(), _tensors()
    bias = torch.randn(1, HEADS, S, S, generator=torch.Generator().manual_seed(4))
    reference = bias.double().requires_grad_()
    causal = _added(allowed_pairs(S, S, causal=True))
    _defined(*whole[:3], reference + causal).backward(whole[3].double())
    mine = _cut(bias, 2, rank, 4).requires_grad_()
    found = _compare(rank, whole, bias + causal, None, lambda q, k, v: core(q, k, v, None, attention_bias=mine))
    return [[*found, (mine.grad, _cut(reference.grad, 2, rank, 4).float())]]


def test_attention_bias_is_added_after_the_scale() -> None:
    _check_close(run_ranks(_bias, 4), calls=1)


def _listed(rank: int) -> list[float]:
    """The time-outs of the rings' own groups, after Megatron has changed that of all groups."""
    _core()
    parallel_state.update_pg_timeout(timedelta(seconds=7))
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    ours = [group for group in groups if group.group_desc.startswith("BURST_")]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in ours]


def test_megatrons_new_time_out_is_that_of_the_rings_groups_too() -> None:
    for found in run_ranks(_listed, 4):
        assert found
        assert set(found) == {7.0}


def _rebound(rank: int) -> list[Beside]:
    """Groups of two and of one, given to a layer that was built for four, and the first ones again."""
    core, (q, k, v, _) = _core(), _tensors()
    whole = _defined(q, k, v, _added(allowed_pairs(S, S, causal=True))).float()
    usual = core.pg_collection
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([each]) for each in range(4)]
    found: list[Beside] = []
    for collection, place, size in (
        (SimpleNamespace(cp=pairs[rank // 2]), rank % 2, 2),
        (SimpleNamespace(cp=alone[rank]), 0, 1),
        (usual, rank, 4),
    ):
        core.pg_collection = collection
        out = core(*(_cut(x, 0, place, size) for x in (q, k, v)), None)
        found.append([(out, _cut(whole, 0, place, size))])
    return found


def test_a_layer_may_be_given_other_groups() -> None:
    """As Megatron-Bridge does for evaluation with another context-parallel size."""
    _check_close(run_ranks(_rebound, 4), calls=3)


def _built_for(rank: int) -> tuple[int, int]:
    """Return how many groups the ring of a layer for pairs of ranks has when it is built, and after a call."""
    core, (q, k, v, _) = _core(), _tensors()
    pairs = SimpleNamespace(cp=[dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2])
    config = replace(core.config, hierarchical_context_parallel_sizes=None)
    kind = AttnMaskType.causal
    built = type(core)(config, 1, kind, "self", registry=core.registry, pg_collection=pairs)
    ring = core.registry.contexts()[-1]
    assert ring.group is pairs.cp
    made = ring.created_groups
    built(*(_cut(x, 0, rank % 2, 2) for x in (q, k, v)), None)
    assert core.registry.contexts()[-1] is ring
    return len(made), len(ring.created_groups)


def test_communicators_are_made_when_a_layer_is_built() -> None:
    for built, after_a_call in run_ranks(_built_for, 4):
        assert built == after_a_call > 0


VALID = torch.ones(B, S, dtype=torch.bool)
VALID[0, 20:] = False
VALID[1, :3] = False  # padded on the left, and in the middle
VALID[1, 9] = False


def _padded(causal: bool, keys_only: bool) -> torch.Tensor:
    """Megatron's mask of a padded batch, True where masked: [B, 1, S, S], or [B, 1, 1, S]."""
    if keys_only:
        return ~VALID.view(B, 1, 1, S)
    pairs = allowed_pairs(S, S, causal=causal) & VALID.view(B, 1, 1, S)
    return ~(pairs & VALID.view(B, 1, S, 1))


def _masked(rank: int, kind: AttnMaskType, keys_only: bool) -> list[Beside]:
    core = _core()
    causal = kind is AttnMaskType.padding_causal
    mask = _padded(causal, keys_only)
    local = mask if keys_only else _cut(mask, 2, rank, 4)
    added = _added(allowed_pairs(S, S, causal=causal) & VALID.view(B, 1, 1, S))
    if kind is AttnMaskType.arbitrary:
        added = _added(~mask)  # to the letter: padded queries attend to nothing
    live = None if kind is AttnMaskType.arbitrary else VALID
    return [
        _compare(rank, _tensors(), added, live, lambda q, k, v, g=given: core(q, k, v, g, attn_mask_type=kind))
        for given in ((local, (local, local)) if keys_only else (local,))
    ]


@pytest.mark.parametrize(
    ("kind", "keys_only"),
    [
        (AttnMaskType.padding, False),
        (AttnMaskType.padding, True),
        (AttnMaskType.padding_causal, False),
        (AttnMaskType.arbitrary, False),
    ],
    ids=["padding", "padding_keys", "padding_causal", "arbitrary"],
)
def test_mask_tensors_are_honoured(kind: AttnMaskType, keys_only: bool) -> None:
    _check_close(run_ranks(_masked, 4, kind, keys_only), calls=1 + keys_only)


def _cross(rank: int, kind: AttnMaskType) -> list[Beside]:
    core, pairs = _core(), torch.ones(S, SK, dtype=torch.bool)
    if kind is AttnMaskType.causal_bottom_right:
        pairs = torch.ones(S, SK, dtype=torch.bool).tril(SK - S)
    added = _added(pairs).view(1, 1, S, SK)
    return [_compare(rank, _tensors(SK), added, None, lambda q, k, v: core(q, k, v, None, attn_mask_type=kind))]


@pytest.mark.parametrize("kind", [AttnMaskType.no_mask, AttnMaskType.causal_bottom_right], ids=lambda kind: kind.name)
def test_queries_and_keys_of_other_lengths(kind: AttnMaskType) -> None:
    _check_close(run_ranks(_cross, 4, kind), calls=1)


def _no_key_padding(rank: int) -> tuple[str, str]:
    core = _core()
    q, k, v = (_cut(x, 0, rank, 4) for x in _tensors()[:3])
    mask = _padded(False, False)
    mask[0, 0, 5, 7] = True  # on one rank only
    errors = []
    for given in (_cut(mask, 2, rank, 4), mask[:, 0]):
        with pytest.raises(ValueError, match="attention_mask") as error:
            core(q, k, v, given, attn_mask_type=AttnMaskType.padding)
        errors.append(str(error.value))
    return errors[0], errors[1]


def test_masks_that_are_no_key_padding_are_refused_on_every_rank() -> None:
    for no_padding, three_dims in run_ranks(_no_key_padding, 4):
        assert "does not mask whole keys" in no_padding
        assert "use attn_mask_type=arbitrary" in no_padding
        assert three_dims == "attention_mask must be [1 or batch, 1, queries, keys], got [2, 32, 32]"


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Masks are looked at in slices of two rows of 16 keys; how many elements each of them has."""
    seen: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        found = allowed(*args)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(masks, "ELEMENTS_AT_ONCE", 35)
    monkeypatch.setattr(masks, "allowed", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_every_row_of_a_mask_is_looked_at_a_few_at_a_time(few_at_once: list[int], dtype: torch.dtype) -> None:
    cp, rows = ContextParallel(), 15
    mask = torch.ones(rows, rows, dtype=torch.bool).triu(1).expand(2, 1, -1, -1).to(dtype)
    masks.check_same(cp, mask, Causal())
    assert few_at_once == [2 * rows] * 7 + [rows]
    for row, key in product((0, 1, 13, 14), (0, 7, 14)):
        other = mask.clone()
        other[1, 0, row, key] = 1 - int(other[1, 0, row, key])
        with pytest.raises(ValueError, match="is not the Causal"):
            masks.check_same(cp, other, Causal())
    with pytest.raises(ValueError, match="is not the Causal"):
        masks.check_same(cp, torch.cat([mask, mask], 2), Causal())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_every_row_of_a_padding_mask_is_looked_at_a_few_at_a_time(few_at_once: list[int], dtype: torch.dtype) -> None:
    cp, rows = ContextParallel(), 15
    padded = torch.arange(rows) >= 11
    mask = (padded | torch.ones(rows, rows, dtype=torch.bool).triu(1)).view(1, 1, rows, rows).to(dtype)
    mask[:, :, 12] = 1  # all keys of a padded query
    assert masks.read_key_padding(cp, mask, Causal()) == key_padding(~padded.unsqueeze(0)).masks[0]
    assert few_at_once == [2 * rows] * 7 + [rows]
    for row, key in product((1, 10, 14), (0, 13)):
        other = mask.clone()
        other[0, 0, row, key] = 1 - int(other[0, 0, row, key])
        with pytest.raises(ValueError, match="does not mask whole keys"):
            masks.read_key_padding(cp, other, Causal())


def _no_mask(rank: int) -> list[float]:
    core = _core(GptRun(layers=2, cp=2, cp_comm_type="burst"))
    k = torch.zeros(32, 1, 4, 8)
    return core(torch.zeros(32, 1, 8, 8), k, k + rank, None, attn_mask_type=AttnMaskType.no_mask).unique().tolist()


def test_no_mask_is_full_attention() -> None:
    assert run_ranks(_no_mask, 2) == [pytest.approx([0.5])] * 2


def _windowed_cross(rank: int) -> str:
    core = _core(replace(RUN, config={"window_size": (4, 0)}))
    with pytest.raises(ValueError, match="window_size") as error:
        core(*(_cut(x, 0, rank, 4) for x in _tensors(SK)[:3]), None, attn_mask_type=AttnMaskType.no_mask)
    return str(error.value)


def test_windows_need_as_many_queries_as_keys() -> None:
    assert (
        run_ranks(_windowed_cross, 4)
        == [
            "window_size=(4, 0) needs as many queries as keys; set it to None, or leave this layer out by "
            "window_attn_skip_freq"
        ]
        * 4
    )


def _size_without_group(rank: int) -> str:
    core, params = _core(), PackedSeqParams("sbhd", local_cp_size=2)
    with pytest.raises(ValueError, match="local_cp_size") as error:
        core(*(_cut(x, 0, rank, 4) for x in _tensors()[:3]), None, packed_seq_params=params)
    return str(error.value)


def test_a_size_without_a_group_is_refused() -> None:
    wanted = "packed_seq_params has local_cp_size=2 without a cp_group; give both"
    assert run_ranks(_size_without_group, 4) == [wanted] * 4


# ------------------------------------------------------------------------------------------------------------ dropout


def _seeds(rank: int) -> tuple[list[list[int]], bool]:
    """The seeds of two layers in two microbatches, under tensor and context parallelism; and of an evaluation."""
    run = replace(RUN, cp=2, tp=2, hierarchical=None, config={"attention_dropout": 0.1})
    model = build(run)
    cores = [layer.self_attention.core_attention for layer in model.module.decoder.layers]
    drawn: list[list[int]] = []
    for core in cores:
        seeds: list[int] = []
        drawn.append(seeds)
        core.draw_seed = lambda draw=core.draw_seed, seeds=seeds: seeds.append(draw()) or seeds[-1]
    data = batches(random_tokens(run))
    for _ in range(2):
        forward_step(data, model)
    model.eval()
    forward_step(batches(random_tokens(run)), model)
    return drawn, all(len(seeds) == 2 for seeds in drawn)


def test_seeds_differ_between_layers_microbatches_and_tensor_ranks_only() -> None:
    results = run_ranks(_seeds, 4)
    assert all(evaluated_without for _, evaluated_without in results)
    seeds = [seeds for seeds, _ in results]
    assert seeds[0] == seeds[2]  # tensor-parallel rank 0 of both context-parallel ranks
    assert seeds[1] == seeds[3]
    flat = [seed for rank in seeds[:2] for layer in rank for seed in layer]
    assert len(set(flat)) == 8
    assert all(0 <= seed < 2**63 for seed in flat)


# -------------------------------------------------------------------------------- checkpoints


def _checkpoint(rank: int, burst: bool) -> dict[str, Any]:
    run = GptRun(layers=2, tp=2, cp=1, config={"softmax_type": "learnable"})
    if burst:
        run = replace(run, cp=2, cp_comm_type="burst")
    model = build(run)
    sharded = model.module.sharded_state_dict(metadata=None)
    found = {key: x for key, x in sharded.items() if "softmax_offset" in key}
    core = model.module.decoder.layers[0].self_attention.core_attention
    return {
        "parameter": (tuple(core.softmax_offset.shape), core.softmax_offset.dtype),
        **{
            key: (x.key, x.global_shape, x.global_offset, x.axis_fragmentations, x.local_shape)
            for key, x in found.items()
        },
    }


def test_sinks_are_saved_as_megatrons() -> None:
    megatrons = run_ranks(_checkpoint, 2, False)
    assert len(megatrons[0]) == 3
    for rank, found in enumerate(run_ranks(_checkpoint, 4, True)):
        assert found == megatrons[rank % 2]


def _packed(rank: int) -> list[Beside]:
    """Both ways of saying "no mask", of documents of 16 tokens, 13 and 16 of them real."""
    core, starts, lengths = _core(), (0, 16, 32), (13, 16)
    q, k, v, dout = (x[:, :1] for x in _tensors())
    pairs = allowed_pairs(S, S, causal=False, packed=(starts, lengths))
    reference = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _defined(*reference, _added(pairs).view(1, 1, S, S)).squeeze(1)
    expected.backward(dout.double().squeeze(1))
    rows = packed_indices(starts, 4, rank)
    real, padded = torch.tensor([0, 13, 29]), torch.tensor(starts)
    params, found = PackedSeqParams("thd", real, real, padded, padded), list[Beside]()
    for kind in (AttnMaskType.no_mask, AttnMaskType.padding):
        local = [x.squeeze(1)[rows].requires_grad_() for x in (q, k, v)]
        out = core(*local, attn_mask_type=kind, packed_seq_params=params)
        out.backward(dout.squeeze(1)[rows])
        grads = [(got.grad, x.grad.squeeze(1)[rows]) for got, x in zip(local, reference, strict=True)]
        found.append([(out.detach(), expected[rows].detach().float()), *grads])
    return found


def test_padding_of_documents_neither_attends_nor_is_attended_to() -> None:
    _check_close(run_ranks(_packed, 4), calls=2)


@pytest.mark.parametrize(
    ("name", "value", "usual"),
    [("cp_partition_mode", "contiguous", "zigzag"), ("zigzag_cp_min_chunk_size", 64, 0)],
)
def test_batches_that_newer_releases_cut_otherwise_are_refused(name: str, value: object, usual: object) -> None:
    params = PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 16]), cp_group=None, max_seqlen_q=16)
    setattr(params, name, usual)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_known(params)
    setattr(params, name, value)
    with pytest.raises(ValueError, match=rf"packed_seq_params\.{name}={value!r} is not supported"):
        check_known(params)


def test_what_this_release_says_of_packed_sequences_is_known() -> None:
    """Each field of it is honoured, or refused if it is set."""
    for name in vars(PackedSeqParams()):
        params = PackedSeqParams()
        setattr(params, name, object())
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("error")
            check_known(params)


def test_what_newer_releases_say_of_packed_sequences_is_told() -> None:
    params = PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 16]))
    params.window_per_document = torch.tensor([4])
    with pytest.warns(UserWarning, match="does not know packed_seq_params.window_per_document"):
        check_known(params)


def _refused_packed(rank: int) -> list[str]:
    core = _core()
    q, k, v = (torch.zeros(4, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    params = PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 16]))
    errors = []
    for options in ({"attention_mask": torch.zeros(1, 1, 4, 16)}, {"attn_mask_type": AttnMaskType.arbitrary}):
        with pytest.raises(ValueError, match="by cu_seqlens") as error:
            core(q, k, v, packed_seq_params=params, **options)
        errors.append(str(error.value))
    return errors


def test_packed_sequences_take_no_other_masks() -> None:
    for with_tensor, with_type in run_ranks(_refused_packed, 4):
        assert with_tensor.endswith("got an attention_mask")
        assert with_type.endswith("got attn_mask_type=arbitrary")


def _largest_scores(rank: int) -> torch.Tensor:
    """Of two microbatches, over all ranks, as Megatron's `clip_qk` takes them."""
    core = build(replace(RUN, config={"qk_clip": True})).module.decoder.layers[0].self_attention.core_attention
    assert core.current_max_attn_logits is None
    for scale in (1.0, 0.5):
        q, k, v = (_cut(x, 0, rank, 4) for x in _tensors()[:3])
        core(q * scale, k, v, None, attn_mask_type=AttnMaskType.causal)
    torch.distributed.all_reduce(core.current_max_attn_logits, torch.distributed.ReduceOp.MAX)
    return core.current_max_attn_logits


def test_largest_scores_for_qk_clip() -> None:
    q, k = _tensors()[:2]
    scores = torch.einsum("ibhd,jbhd->hbij", q, k.repeat_interleave(HEADS // GROUPS, dim=2)) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.maximum(scores.amax((1, 2, 3)), 0.5 * scores.amax((1, 2, 3)))
    for largest in run_ranks(_largest_scores, 4):
        torch.testing.assert_close(largest, expected)


# -------------------------------------------------------------------------------------------- refused, each by name


def _said(core: Any, *tensors: torch.Tensor, **options: Any) -> str:
    with pytest.raises(ValueError, match=" ") as raised:
        core(*tensors, **options)
    return str(raised.value)


def _refused(rank: int) -> list[str]:
    core, (q, k, v, _) = _core(), _tensors()
    q, k, v = (_cut(x, 0, rank, 4) for x in (q, k, v))
    uncut = torch.zeros(B, 1, S, S, dtype=torch.bool)
    found = [_said(core, q, k, v, uncut, attn_mask_type=AttnMaskType.arbitrary)]
    offsets = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    rows = {"qkv_format": "sbhd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    whole = core(q, k, v, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=PackedSeqParams(**rows))
    torch.testing.assert_close(whole, core(q, k, v, attn_mask_type=AttnMaskType.causal))
    rows["cu_seqlens_kv"] = torch.tensor([0, S - 1, 2 * S - 1], dtype=torch.int32)
    padded = {"attn_mask_type": AttnMaskType.padding, "packed_seq_params": PackedSeqParams(**rows)}
    found.append(_said(core, q, k, v, **padded))
    return found


def test_what_would_be_computed_for_wrong_tokens_is_refused() -> None:
    for arbitrary, padding in run_ranks(_refused, 4):
        assert arbitrary.startswith(
            "attention_mask of attn_mask_type=arbitrary must be [1 or batch, 1 or heads, 8 quer"
        )
        assert padding.endswith("got some in format sbhd that leave room for padding")
