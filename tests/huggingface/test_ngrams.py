"""Embeddings of n-grams and the dilated convolution after them (Qwen4) on shards: by definition, in float64."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from burst_plugin import ContextParallel
from burst_plugin.batch import shard_batch
from burst_plugin.huggingface import RingCache, mask_indexers, prepare
from burst_plugin.huggingface.models import problems
from burst_plugin.huggingface.recurrent import modules
from burst_plugin.huggingface.recurrent.families import MIXERS
from tests.support.ranks import run_ranks
from tests.support.sparse_families import build, sparse_families

pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpTextConfig"), reason="transformers has no Qwen4"),
]
END = 2  # a token after which n-grams begin anew
DRAWS = 16
LAYOUTS = ("zigzag", "contiguous", "striped", "auto")


@cache
def _layer() -> Any:
    """A layer of n-grams of 2 to 4 tokens, with a convolution of 3 places, 4 tokens apart; in float64."""
    config = sparse_families()["qwen4_exp_text"]
    config.ngram_size, config.ple_conv_kernel_size, config.ple_embed_dim = 4, 3, 24
    return build(config).model.layers[0].ple.double()


def _draw(number: int) -> tuple[dict[str, Tensor], list[list[tuple[int, int]]]]:
    """A batch of few ids, one in four of which ends n-grams; and where the documents of each row are."""
    draws, generator = random.Random(number), torch.Generator().manual_seed(number)
    rows, length = draws.choice([1, 2]), draws.choice([8, 13, 24, 41])
    ids = torch.randint(1, 7, (rows, length), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = END
    if draws.random() < 0.5:
        starts = [draws.choice([0, draws.randrange(length)]) for _ in range(rows)]
        mask = (torch.arange(length) >= torch.tensor(starts)[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask}, [[(start, length)] for start in starts]
    cuts = sorted({0, length, *(draws.randrange(1, length) for _ in range(draws.randrange(5)))})
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)]).expand(rows, -1)
    return {"input_ids": ids, "position_ids": positions}, [list(pairwise(cuts))] * rows


def _embedded(module: Any, ids: list[int]) -> Tensor:
    """The definition, of one document: [S, E]."""
    sizes, offsets = module.ngram_heads_vocab_sizes.tolist(), module.ngram_heads_offsets.tolist()
    found = []
    for at in range(len(ids)):
        back, is_over = [ids[at]], False
        for before in range(1, module.ngram_size):
            is_over = is_over or at < before or ids[at - before] == END
            back.append(END if is_over else ids[at - before])
        rows = []
        for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            mixed = 0
            for token, factor in list(zip(back, module.layer_multipliers.tolist(), strict=True))[
                : 2 + head // module.heads_per_ngram
            ]:
                mixed ^= token * factor
            rows.append(mixed % size + offset)
        found.append(module.ngram_embedding.weight[rows].flatten())
    return torch.stack(found)


def _convolved(module: Any, x: Tensor) -> Tensor:
    """The definition, of one document [S, C]."""
    weight, step, out = module.conv1d.weight[:, 0], module.ple_embedding.ngram_size, []
    for at in range(len(x)):
        parts = [weight[:, -1 - n] * x[at - n * step] for n in range(weight.shape[1]) if at >= n * step]
        out.append(torch.nn.functional.silu(torch.stack(parts).sum(0)))
    return torch.stack(out)


def _tensors(number: int, shape: torch.Size, module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What goes into the convolution, and the gradients of both outputs."""
    generator = torch.Generator().manual_seed(number)
    sizes = module.conv1d.weight.shape[0], module.conv1d.weight.shape[0], 24
    x, dout, dembedded = (torch.randn(*shape, size, generator=generator, dtype=torch.float64) for size in sizes)
    return x, dout, dembedded


def _expected(number: int) -> list[Tensor]:
    module, (batch, documents) = _layer(), _draw(number)
    x, dout, dembedded = _tensors(number, batch["input_ids"].shape, module)
    x.requires_grad_()
    embedded, out = torch.zeros_like(dembedded), torch.zeros_like(dout)
    for row, spans in enumerate(documents):
        for a, b in spans:
            embedded[row, a:b] = _embedded(module.ple_embedding, batch["input_ids"][row, a:b].tolist())
            out[row, a:b] = _convolved(module, x[row, a:b])
    table, weight = module.ple_embedding.ngram_embedding.weight, module.conv1d.weight
    grads = torch.autograd.grad((out * dout).sum() + (embedded * dembedded).sum(), (x, table, weight))
    return [embedded.detach(), out.detach(), *grads]


def _on_ring(rank: int) -> list[list[Tensor]]:
    rings, found = {layout: ContextParallel(dist.group.WORLD, layout=layout) for layout in LAYOUTS}, []
    for number in range(DRAWS):
        module, (batch, _), cp = _layer(), _draw(number), rings[LAYOUTS[number % len(LAYOUTS)]]
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        whole = _tensors(number, real.shape, module)
        entries = dict(zip(("x", "dout", "dembedded"), whole, strict=True))
        local = shard_batch({**batch, **entries, "real": real[..., None]}, cp)
        shard, x, is_real = local["burst"], local["x"].requires_grad_(), local["real"]
        ids = torch.where(is_real[..., 0], local["input_ids"], END)  # as the model does it
        embedded = modules.ngram_embedding(module.ple_embedding, shard, {"input_ids": ids})
        out = modules.dilated_convolution(module, shard, {"hidden_states": x})
        loss = (out * local["dout"] * is_real).sum() + (embedded * local["dembedded"] * is_real).sum()
        table, weight = module.ple_embedding.ngram_embedding.weight, module.conv1d.weight
        dx, *of_parameters = torch.autograd.grad(loss, (x, table, weight))
        for grad in of_parameters:
            dist.all_reduce(grad)
        found.append([*(shard.unshard(each.detach() * is_real) for each in (embedded, out, dx)), *of_parameters])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_batches_are_computed_by_the_definition(ranks: int) -> None:
    for number, found in enumerate(run_ranks(_on_ring, ranks, timeout_s=120.0)[0]):
        for ours, truth in zip(found, _expected(number), strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11, msg=f"draw {number}")


def test_caches_of_a_ring_and_padding_in_a_text_are_refused() -> None:
    ids = _draw(1)[0]["input_ids"][:, :8].repeat(1, 2)
    config = sparse_families()["qwen4_exp_text"]
    usual: dict[str, Any] = {"past_key_values": RingCache(ContextParallel()), "max_new_tokens": 2}
    with pytest.raises(ValueError, match="its n-grams look back at tokens that the cache does not have"):
        prepare(build(config)).eval().generate(ids, **usual)
    mask = torch.ones_like(ids)
    mask[:, 5:8] = 0
    with pytest.raises(ValueError, match="padding ends at token 8 of batch row 0, in the middle of a document"):
        prepare(build(config))(**shard_batch({"input_ids": ids, "attention_mask": mask}, ContextParallel()))
    config.ple_layer_ids = []
    with pytest.raises(ValueError, match=r"Qwen4ExpTextAttention selects pools .* has index keys of single tokens"):
        prepare(build(config)).eval().generate(ids, **{**usual, "past_key_values": RingCache(ContextParallel())})


def test_layers_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(sparse_families()["qwen4_exp_text"])
    assert problems(model) == []
    monkeypatch.setattr(mask_indexers, "_USED", ("index_qk_proj", "get_blocks"))
    known = MIXERS["Qwen4ExpTextPLELayer"]
    monkeypatch.setitem(MIXERS, "Qwen4ExpTextPLELayer", known._replace(calls=("_short_conv", "pad_left")))
    told = "; ".join(problems(model))
    assert "Qwen4ExpTextQSAIndexer does not use get_blocks, as in the releases" in told
    assert "Qwen4ExpTextPLELayer does not use pad_left, as in the releases" in told
