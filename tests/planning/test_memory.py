"""What a plan says about memory: against what a step and a ring hold, and against sums worked out by hand."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from burst_plugin.activations import Head, linear_cross_entropy
from burst_plugin.planning.cluster import Cluster
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology
from burst_plugin.training.layer_memory import Widths, moments, ring_shapes
from burst_plugin.training.memory import GIB, memory
from burst_plugin.training.model_shape import MODELS, ModelShape, shape_of
from burst_plugin.training.setting import Code, Setting
from tests.support.measured_step import activation_bytes, measured_code
from tests.support.ring_memory import backward_bytes

WAITS = ("inputs of layers", "attention, kept", "at work")
TINY = ModelShape(name="tiny", layers=8, hidden=512, ffn=1536, heads=8, kv_heads=2, head_dim=64, vocab=256)
GPU_CODE = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False)


def said(shape: ModelShape, setting: Setting) -> tuple[float, str]:
    """The bytes that a plan gives for what a step makes, and the moment of the peak."""
    found = memory(shape, setting, Cluster())
    return sum(found.gpu[name] for name in WAITS), found.fullest


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("changes", "tokens", "recompute", "fullest"),
    [
        ({}, 4096, "full", "MLP, backward"),
        ({"layers": 2}, 16384, "full", "MLP, backward"),
        ({"layers": 40, "hidden": 256, "head_dim": 32}, 2048, "full", "MLP, backward"),
        ({"vocab": 8192}, 4096, "full", "head and loss"),
        ({"vocab": 8192, "layers": 2}, 16384, "full", "head and loss"),
        ({"ffn": 64, "layers": 3}, 4096, "full", "norm, backward"),
        ({"ffn": 512, "kv_heads": 8}, 4096, "full", "norm, backward"),
        ({}, 4096, "none", "norm, backward"),
        ({"layers": 3, "vocab": 4096}, 8192, "none", "head and loss"),
        ({"qk_norm": True, "kv_heads": 8, "ffn": 64}, 4096, "full", "norm, backward"),
        ({"qk_norm": True}, 4096, "none", "norm, backward"),
    ],
)
@pytest.mark.parametrize("plain_norms", [True, False])
def test_a_step_takes_what_the_plan_says(
    changes: dict[str, int], tokens: int, recompute: str, fullest: str, plain_norms: bool
) -> None:
    shape = replace(TINY, **changes)  # type: ignore[arg-type]
    code = replace(measured_code(), plain_norms=plain_norms)
    setting = Setting(tokens=tokens, code=code, recompute=recompute)
    expected, moment = said(shape, setting)
    measured = activation_bytes(shape, setting).peak
    print(f"{changes} {tokens} {recompute} plain {plain_norms}: {expected / measured:.4f} {moment}")
    assert moment == fullest or not plain_norms
    assert expected == pytest.approx(measured, rel=0.05)


_EXPERTS: dict[str, dict[str, Any]] = {  # as in a config.json
    "glm4_moe": {"n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 256},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 256},
    "olmoe": {"num_experts": 16, "intermediate_size": 256},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 384},
    "gpt_oss": {"num_local_experts": 32, "intermediate_size": 512},
}


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", _EXPERTS)
@pytest.mark.parametrize(("active", "tokens"), [(4, 4096), (2, 512)])  # with few tokens gradients of weights are more
def test_a_step_with_experts_takes_what_the_plan_says(kind: str, active: int, tokens: int) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": active}
    more = {"pad_token_id": None, "eos_token_id": None, "first_k_dense_replace": 0}
    config = AutoConfig.for_model(kind, **sizes, **heads, **more, **_EXPERTS[kind])
    shape = shape_of(config.to_dict(), kind)
    setting = Setting(tokens=tokens, code=measured_code(), recompute="full")
    expected, moment = said(shape, setting)
    measured = activation_bytes(shape, setting, config=config).peak
    print(f"{kind} {tokens} tokens, {active} experts: {expected / measured:.4f} {moment}")
    assert moment == "MLP, backward"
    assert expected == pytest.approx(measured, rel=0.05)


def in_chunks(model: Any, setting: Setting) -> None:
    """Switch on what the setting has in chunks."""
    from burst_plugin.huggingface.chunked_modules import chunk_modules

    chunk_modules(model, Strategy(mlp_chunk=setting.mlp_chunk))
    if not setting.loss_chunk:
        return

    def forward(input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
        hidden = model.model(input_ids=input_ids, **options).last_hidden_state
        losses = linear_cross_entropy(hidden, Head(model.lm_head, chunk=setting.loss_chunk), labels)
        return SimpleNamespace(loss=losses.mean())

    model.forward = forward


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("plain_norms", [True, False])
@pytest.mark.parametrize(
    ("changes", "recompute", "loss_chunk", "mlp_chunk", "fullest"),
    [
        ({}, "full", 0, 1024, "MLP, backward"),
        ({"ffn": 2048, "layers": 3}, "full", 0, 512, "MLP, backward"),
        ({"vocab": 32768, "layers": 3}, "full", 512, 1024, "head and loss"),
        ({"vocab": 8192, "layers": 2}, "full", 2048, 1024, "head and loss"),
        ({"vocab": 8192, "ffn": 512}, "full", 512, 0, "norm, backward"),
        ({"ffn": 64}, "full", 0, 1024, "norm, backward"),
        ({"ffn": 64, "kv_heads": 8, "layers": 2}, "full", 0, 512, "norm, backward"),
        ({"ffn": 64, "qk_norm": True}, "full", 0, 256, "norm, backward"),
        ({"qk_norm": True}, "none", 0, 512, "head and loss"),
    ],
)
def test_a_step_in_chunks_takes_what_the_plan_says(
    changes: dict[str, int], recompute: str, loss_chunk: int, mlp_chunk: int, fullest: str, plain_norms: bool
) -> None:
    shape = replace(TINY, **changes)  # type: ignore[arg-type]
    code = replace(measured_code(), plain_norms=plain_norms)
    setting = Setting(tokens=8192, code=code, recompute=recompute, loss_chunk=loss_chunk, mlp_chunk=mlp_chunk)
    expected, moment = said(shape, setting)
    live = activation_bytes(shape, setting, prepare=in_chunks)
    print(f"{changes} {recompute} {loss_chunk} {mlp_chunk} plain {plain_norms}: {expected / live.peak:.4f} {moment}")
    assert moment == fullest or not plain_norms
    assert expected == pytest.approx(live.peak, rel=0.05)


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("recompute", "vocab"), [("full", 256), ("full", 8192), ("none", 256)])
@pytest.mark.parametrize("chunk", [0, 1024])
def test_a_micro_batch_takes_what_its_sequences_take_together(recompute: str, vocab: int, chunk: int) -> None:
    shape, chunks = replace(TINY, vocab=vocab), {"loss_chunk": chunk, "mlp_chunk": chunk}
    setting = Setting(
        tokens=4096,
        code=measured_code(),
        recompute=recompute,
        batch=3,
        micro_batch=3,
        **chunks,  # type: ignore[arg-type]
    )
    expected, moment = said(shape, setting)
    measured = activation_bytes(shape, setting, prepare=in_chunks).peak
    print(f"{recompute} {vocab} {chunk}: {expected / measured:.4f} {moment}")
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("tokens", [2048, 4096, 8192, 16384])
@pytest.mark.parametrize(
    ("recompute", "loss_chunk", "mlp_chunk"),
    [("none", 0, 0), ("none", 512, 512), ("full", 0, 0), ("full", 512, 0), ("full", 0, 512), ("full", 512, 512)],
)
def test_every_length_takes_what_the_plan_says(recompute: str, loss_chunk: int, mlp_chunk: int, tokens: int) -> None:
    shape = replace(TINY, vocab=8192)
    chunks = {"loss_chunk": loss_chunk, "mlp_chunk": mlp_chunk}
    setting = Setting(tokens=tokens, code=measured_code(), recompute=recompute, **chunks)  # type: ignore[arg-type]
    expected, moment = said(shape, setting)
    measured = activation_bytes(shape, setting, prepare=in_chunks).peak
    print(f"{recompute} {loss_chunk} {mlp_chunk} {tokens}: {expected / measured:.4f} {moment}")
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.huggingface
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_in_chunks_a_token_takes_no_more_where_vocabulary_or_width_are_larger() -> None:
    def per_token(shape: ModelShape) -> float:
        """The bytes that a longer sequence takes more, by token."""
        setting = Setting(tokens=6144, code=measured_code(), loss_chunk=512, mlp_chunk=512)
        longer = replace(setting, tokens=2 * setting.tokens)
        peaks = [activation_bytes(shape, each, prepare=in_chunks).peak for each in (setting, longer)]
        return (peaks[1] - peaks[0]) / setting.tokens

    shape = replace(TINY, vocab=8192)
    expected = per_token(shape)
    assert per_token(replace(shape, vocab=32768)) <= expected
    assert per_token(replace(shape, ffn=6144)) <= expected


@pytest.mark.parametrize("tokens", [1024, 2**18])  # of a rank: large results of tiles do not wait
@pytest.mark.parametrize("heads", [(32, 8), (32, 32)], ids=str)
@pytest.mark.parametrize(
    ("ranks", "ulysses", "parts"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 1, 4), (8, 8, 1), (8, 4, 1), (8, 2, 1)],
)
def test_a_rank_of_a_ring_holds_what_the_plan_says(
    heads: tuple[int, int], ranks: int, ulysses: int, parts: int, tokens: int
) -> None:
    """On a GPU, where results of tiles wait; what kernels allocate and free inside is not seen.

    Not to the byte: buffers and results of tiles need not be at their most at the same time.
    """
    q_heads, kv_heads = heads
    shape = replace(TINY, heads=q_heads, kv_heads=kv_heads, head_dim=128)
    setting = Setting(
        tokens=tokens * ranks,
        context=ranks,
        inner=ranks,
        ulysses=ulysses,
        parts=parts,
        code=replace(GPU_CODE, workspace=0),
    )
    w = Widths(shape, setting)
    ring = ring_shapes(shape, replace(setting, ulysses=1))
    measured = backward_bytes(Topology(1, ranks), ring, ulysses_degree=ulysses, parts=parts).peak
    attention = moments(shape, setting)["attention, backward"]
    others = ("normalized input", "gradient past the MLP", "gradient of out", "cos and sin of positions")
    mine = sum(nbytes for name, nbytes in attention.items() if name not in others)
    if ulysses == 1:
        mine -= w.q + w.kv  # which the ring is given; it makes those that come of an exchange
    gpu = memory(shape, setting, Cluster()).gpu
    mine += gpu["ring buffers"] + gpu.get("buffers for exchanging heads", 0.0)
    print(f"{tokens} tokens, {heads} heads, {ranks} ranks, ulysses {ulysses}, {parts} parts: {mine / measured:.4f}")
    assert mine == pytest.approx(measured, rel=0.12)


def test_sums_worked_out_by_hand() -> None:
    """Llama 3 8B on 1M tokens, 8 ranks: a row is 1 GiB, the ring's block of keys and values half of that."""
    setting = Setting(
        tokens=2**20, context=8, inner=8, zero=3, keep=1.0, loss_chunk=1024, mlp_chunk=4096, code=GPU_CODE
    )
    found = memory(MODELS["llama3_8b"], setting, Cluster(margin_gib=4.0))
    gib = {name: nbytes / GIB for name, nbytes in found.gpu.items()}
    assert gib["inputs of layers"] == 32
    assert gib["attention, kept"] == pytest.approx(32 * (1 + 32 * 4 / 8192))  # lse: 32 heads in float32
    assert gib["weights"] == pytest.approx(8_030_261_248 * 2 / 8 / 2**30)
    assert gib["gradients"] == pytest.approx(8_030_261_248 * 4 / 8 / 2**30)
    assert gib["optimizer"] == pytest.approx(8_030_261_248 * 12 / 8 / 2**30)
    assert gib["ring buffers"] == pytest.approx(2 * 0.5 + 3 * 1.0, rel=0.25)
    assert gib["left for CUDA, NCCL and the allocator"] == 4
    assert gib["NCCL's buffers"] == pytest.approx(2 * 8 * 9.4 / 1024), "8 thread blocks; operands, sums"
    # normalized input, q, k and v, out, gradient past the MLP, dout; dq: a new one, the sum in float32;
    # dk and dv of a tile and of the own block, and the kernel's dq in float32; cos and sin
    rows = 1 + 1 + 0.5 + 1 + 1 + 1 + (1 + 2) + 0.5 + 0.5 + 2 + 0.0625
    assert gib["at work"] == pytest.approx(rows + 2 * 32 * 4 / 8192)
    assert found.fullest == "attention, backward"
    assert found.host_bytes == 8 * 8 * GIB


@pytest.mark.parametrize(
    ("nodes", "inner", "ulysses", "buffers"),
    [
        (1, 1, 1, 0),
        (1, 2, 1, 2 * 8),
        (1, 8, 1, 2 * 8),
        (4, 8, 1, 2 * (8 + 4)),
        (4, 1, 1, 2 * 4),
        (1, 8, 8, 7 * 32),  # no limit where heads are exchanged
        (2, 8, 4, 2 * (8 + 4) + 3 * 32),
        (2, 8, 8, 2 * 4 + 7 * 32),
        (2, 8, 16, 15 * 4),  # over a communicator that leaves the node
    ],
)
def test_nccl_has_buffers_for_every_peer_that_sends(nodes: int, inner: int, ulysses: int, buffers: int) -> None:
    ranks = nodes * inner
    setting = Setting(tokens=2**20, context=ranks, inner=inner, ulysses=ulysses, code=GPU_CODE)
    found = memory(MODELS["llama2_7b"], setting, Cluster(nodes=nodes)).gpu["NCCL's buffers"]
    assert found == pytest.approx(buffers * 9.4 * 2**20)


def test_the_host_gets_what_is_offloaded() -> None:
    setting = Setting(tokens=2**20, context=8, inner=8, zero=3, loss_chunk=1024, mlp_chunk=4096, code=GPU_CODE)
    kept = memory(MODELS["llama3_8b"], setting, Cluster())
    moved = memory(MODELS["llama3_8b"], replace(setting, offload=True, offload_optimizer=True), Cluster())
    assert moved.gpu["inputs of layers"] == moved.gpu["optimizer"] == moved.gpu["gradients"] == 0
    assert moved.host["inputs of layers"] == 8 * kept.gpu["inputs of layers"]
    kept = memory(MODELS["llama3_8b"], replace(setting, keep=1.0), Cluster())
    moved = memory(
        MODELS["llama3_8b"],
        replace(setting, keep=1.0, offload=True, offload_optimizer=True, tokens=3 * 2**18),
        Cluster(),
    )
    assert moved.gpu["attention, kept"] == 0
    assert moved.host["inputs of layers"] == 8 * 32 * 0.75 * GIB, "48 whole pages each"
    assert moved.host["attention, kept"] == 8 * 32 * (0.75 * GIB + 2**24), "lse: 12 MiB on a page of 16"
    assert moved.host["optimizer and gradients"] == pytest.approx(8 * (kept.gpu["optimizer"] + kept.gpu["gradients"]))
    assert moved.at_work["inputs of layers, back from the host"] == 2 * 0.75 * 2**30


def test_a_share_of_attention_is_kept_and_the_rest_computed_again() -> None:
    """In zigzag, rank r of P has chunks r and 2 P - 1 - r: half is kept of each rank, or three quarters of none."""
    for ranks in (1, 4, 8):
        setting = Setting(tokens=2**20, context=ranks, inner=ranks, code=GPU_CODE)
        assert (replace(setting, keep=0.0).kept_share, replace(setting, keep=0.0).again_share()) == (0, 1)
        assert (replace(setting, keep=1.0).kept_share, replace(setting, keep=1.0).again_share()) == (1, 0)
        half = replace(setting, keep=0.5)
        assert half.kept_share == 0.5
        assert half.again_share() == pytest.approx((2 * ranks - 1) / (4 * ranks))  # of the middle's chunk
    alone = replace(setting, context=1, inner=1)
    for keep in (0.1, 0.3, 0.75):  # whose chunks are cut
        assert replace(alone, keep=keep).again_share() == pytest.approx((1 - keep) ** 2)
    most = replace(setting, keep=0.75)
    assert most.kept_share == 1.0, "ranks 4 to 7 keep both chunks"


def test_parameters_are_those_of_the_models() -> None:
    assert MODELS["llama2_7b"].parameters == 6_738_415_616
    assert MODELS["llama3_8b"].parameters == 8_030_261_248
    assert MODELS["qwen3_8b"].parameters == 8_190_735_360
    assert MODELS["qwen3_14b"].parameters == 14_768_307_200


def test_the_first_stage_of_a_pipeline_has_the_whole_embedding() -> None:
    model = MODELS["qwen3_14b"]
    setting = Setting(tokens=8192, code=GPU_CODE, pipeline=8, data=8, batch=8)
    weights = memory(model, setting, Cluster()).gpu["weights"]
    layers = model.layers // 8 * model.layer_parameters
    assert weights == pytest.approx(2 * (layers + model.embedding_parameters + model.hidden), rel=1e-6)
    assert weights > 1.3 * 2 * model.parameters / 8
