"""T5, with its three kinds of attention, and microbatches that bring their own groups, against one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_plugin import Strategy
from tests.megatron.test_core_attention import RUN, SK, B, S, _cut
from tests.support.core_attentions import allowed_pairs
from tests.support.megatron_gpt import (
    build,
    check_grads,
    cut_batch,
    leave,
    loss_of,
    random_tokens,
    set_weights,
    transformer_config,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.megatron


def _t5(rank: int, cp: int) -> tuple[float, dict[str, torch.Tensor]]:
    from megatron.core.models.T5 import T5Model, t5_spec

    run = replace(RUN, groups=8, cp=cp, hierarchical=None, cp_comm_type="burst" if cp > 1 else None)
    build(run)
    config = transformer_config(replace(run, config={"normalization": "LayerNorm"}))
    model = T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(2),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(2),
        vocab_size=run.vocab,
        max_sequence_length=SK,
        position_embedding_type="rope",
    )
    set_weights(model, run)
    names = {type(m).__name__ for name, m in model.named_modules() if name.endswith("core_attention")}
    assert names == {"BurstCoreAttention" if cp > 1 else "DotProductAttention"}
    generator = torch.Generator().manual_seed(5)
    encoder, decoder, labels = (torch.randint(run.vocab, (B, n), generator=generator) for n in (SK, S, S))
    read = torch.ones(B, SK, dtype=torch.bool)
    read[0, 30:] = False
    masks = (
        ~(read.view(B, 1, 1, SK) & read.view(B, 1, SK, 1)),
        ~allowed_pairs(S, S, causal=True).expand(B, 1, S, S),
        ~(read.view(B, 1, 1, SK) & torch.ones(S, 1, dtype=torch.bool)),
    )
    losses = model(
        *(_cut(x, 1, rank, cp) for x in (encoder, decoder)),
        *(_cut(x, 2, rank, cp) for x in masks),
        _cut(labels, 1, rank, cp),
    )
    losses.sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    total = losses.detach().sum()
    for x in (total, *grads.values()):
        torch.distributed.all_reduce(x)
    leave()
    return float(total) / (B * S), grads


def test_t5_equals_megatron_on_one_rank() -> None:
    """An encoder with an arbitrary mask, a causal decoder, cross attention of 32 tokens to 48, some padded."""
    ((loss, grads),) = run_ranks(_t5, 1, 1)
    assert any("cross_attention.linear_kv" in name for name in grads)
    for got, found in run_ranks(_t5, 4, 4):
        assert got == pytest.approx(loss, abs=1e-5)
        check_grads(found, grads)


# ------------------------------------------------------------------------------- groups that microbatches bring

LENGTHS = (64, 32, 32, 16, 16, 16, 16)
# Which samples ranks 0 ... 3 run together: all one, then pairs one each, then each one of its own.
HYBRID = (((0, 1, 2, 3), 4), ((0, 1), 2), ((2, 3), 2), ((0,), 1), ((1,), 1), ((2,), 1), ((3,), 1))


def _hybrid(rank: int, world: int, layout: str = "zigzag") -> dict[str, torch.Tensor]:
    """Gradients of all samples, each run by the ranks that `HYBRID` says."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    spread = world > 1
    config = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 16} if spread else {}
    run = replace(RUN, cp=1, hierarchical=None, config=config, cp_comm_type="burst", per_token_loss=True)
    run = replace(run, strategy=Strategy(layout=layout))
    original = parallel_state.initialize_model_parallel
    parallel_state.initialize_model_parallel = lambda **options: original(**options, hybrid_context_parallel=spread)
    model = build(run)
    used = {type(layer.self_attention.core_attention).__name__ for layer in model.module.decoder.layers}
    assert used == {"BurstCoreAttention" if spread else "DotProductAttention"}
    for number, (length, (ranks, size)) in enumerate(zip(LENGTHS, HYBRID, strict=True)):
        ids = random_tokens(replace(run, seq_length=length, microbatch_size=1), 1, seed=number)[0, 0]
        batch = {"tokens": ids[None, :-1], "labels": ids[None, 1:], "position_ids": torch.arange(length)[None]}
        if rank in ranks or not spread:
            group, params = None, None
            if spread and size > 1:
                group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
                batch = cut_batch(batch, group)
            if spread:
                params = PackedSeqParams(
                    "sbhd", max_seqlen_q=length, max_seqlen_kv=length, local_cp_size=size, cp_group=group
                )
            out = model(
                batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params
            )
            loss_of(torch.ones_like(out), out)[0].backward()
    model.finish_grad_sync()
    return {name: param.main_grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_hybrid_context_parallel_groups_equal_one_rank(layout: str) -> None:
    (expected,) = run_ranks(_hybrid, 1, 1)
    for grads in run_ranks(_hybrid, 4, 4, layout):
        check_grads(grads, expected)


def _counts_positions(rank: int) -> list[str]:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.T5 import T5Model, t5_spec

    run = replace(RUN, groups=8, cp=2, hierarchical=None, cp_comm_type="burst")
    build(run)
    config = transformer_config(replace(run, config={"normalization": "LayerNorm"}))
    encoder, decoder = t5_spec.get_t5_encoder_with_local_block_spec, t5_spec.get_t5_decoder_with_local_block_spec
    with pytest.raises(ValueError, match="counts positions") as t5:
        T5Model(config, config, encoder(2), decoder(2), run.vocab, SK)
    with pytest.raises(ValueError, match="counts positions") as bert:
        BertModel(config, 0, bert_layer_specs.bert_layer_local_spec, run.vocab, S)
    with pytest.raises(ValueError, match="add_binary_head=True is not supported"):
        BertModel(config, 0, bert_layer_specs.bert_layer_local_spec, run.vocab, S, position_embedding_type="rope")
    with pytest.raises(ValueError, match="position_embedding_type='relative' is not supported"):
        T5Model(config, config, encoder(2), decoder(2), run.vocab, SK, position_embedding_type="relative")
    config.hybrid_context_parallel = True
    with pytest.raises(ValueError, match="this model does not hand on packed_seq_params"):
        T5Model(config, config, encoder(2), decoder(2), run.vocab, SK, position_embedding_type="rope")
    leave()
    return [str(each.value) for each in (t5, bert)]


def test_models_that_count_positions_themselves_are_refused() -> None:
    for found in run_ranks(_counts_positions, 2):
        assert found[0].startswith("position_embedding_type='learned_absolute' is not supported here")
        assert len(set(found)) == 1
