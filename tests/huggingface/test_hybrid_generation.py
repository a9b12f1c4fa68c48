"""`generate` with a `RingCache` of models with recurrent layers: a ring against transformers on one rank.

One rank computes every row by itself, without padding, and without a cache: those of transformers lose states of
some families where a turn has several tokens, and mix up rows of others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from burst_plugin import ContextParallel
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.generation import name_of_cache
from burst_plugin.recurrent import segments
from tests.support.deepspeed_run import VOCAB
from tests.support.hybrids import build, hybrids
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.huggingface

NAME = name_of_cache()
FAMILIES = hybrids()
FAMILIES[
    "bailing_hybrid"
].initializer_range = 0.08  # else rounding alone changes its logits by 2e-5, on one rank, too
FEW = [
    name
    for name in ("qwen3_next", "falcon_h1", "zamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya")
    if name in FAMILIES
]
PROMPT = torch.randint(3, VOCAB, (2, 41), generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[0] * 13 + [1] * 28, [1] * 41])
STEPS = 3
Told = tuple[torch.Tensor, torch.Tensor]  # the tokens that were generated, and their logits [steps, B, V]
Ask = Callable[..., Told]


def asked(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Told:
    """What `generate` returns; greedy."""
    usual = {"do_sample": False, "max_new_tokens": STEPS, "pad_token_id": 0, "eos_token_id": None}
    usual |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    told = model.generate(ids, **{**usual, **options})
    return told.sequences[:, ids.shape[1] :], torch.stack(told.logits)


def of_rows(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Told:
    """What one rank generates for each row by itself, or for all together if rows depend on each other."""
    if bool(mask.all()):
        return asked(model, ids, mask, use_cache=False, **options)
    rows = [(row[real], real[real].long()) for row, real in zip(ids, mask.bool(), strict=True)]
    each = [asked(model, row[None], real[None], use_cache=False, **options) for row, real in rows]
    return torch.cat([told[0] for told in each]), torch.cat([told[1] for told in each], 1)


def greedy(ask: Ask, make: Callable[[], Any]) -> dict[str, Told]:
    """Prompts that ranks share, padded or not, and a few tokens, down to one."""
    prompts = {
        "plain": (PROMPT, torch.ones_like(PROMPT)),
        "padded": (PROMPT * PADDING, PADDING),
        "few": (PROMPT[:, :3] * torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([[0, 0, 1], [1, 1, 1]])),
        "one": (PROMPT[:, :1], torch.ones(2, 1, dtype=torch.int64)),
    }
    return {name: ask(ids, mask, **make()) for name, (ids, mask) in prompts.items()}


def turns(ask: Ask, make: Callable[[], Any]) -> dict[str, Told]:
    """Two answers to one prompt, in copies of its cache, and questions that follow one of them."""
    ids, mask = PROMPT * PADDING, PADDING
    first, found = make(), {}
    found["prompt"] = ask(ids, mask, **first, max_new_tokens=1)
    for name, lengths in (("short", (4,)), ("long", (9, 2, 21))):
        kept, text, real = copy.deepcopy(first), ids, mask
        for number, length in enumerate(lengths):
            more = PROMPT[:, number : number + length] + len(name) % 2
            text, real = (torch.cat(each, 1) for each in ((text, more), (real, torch.ones_like(more))))
            found[f"{name} {number}"] = ask(text, real, **kept)
            new = found[f"{name} {number}"][0]
            text, real = (torch.cat(each, 1) for each in ((text, new), (real, torch.ones_like(new))))
    return found


def others(ask: Ask, make: Callable[[], Any]) -> dict[str, Told]:
    """Rows that go on after each other, and random ones."""
    whole = torch.ones_like(PROMPT)
    found = {"beams": ask(PROMPT, whole, **make(), num_beams=3, num_return_sequences=2)}
    torch.manual_seed(5)
    found["samples"] = ask(PROMPT, whole, **make(), do_sample=True, num_return_sequences=2)
    return found


def chunks(ask: Ask, make: Callable[[], Any]) -> dict[str, Told]:
    """A prompt in several turns; transformers looks for a cache in what models return, and some have none there."""
    given = make()
    return {"chunks": ask(PROMPT, torch.ones_like(PROMPT), **given, **({"prefill_chunk_size": 15} if given else {}))}


WAYS = {"greedy": greedy, "turns": turns, "others": others, "chunks": chunks}
WITHOUT_CHUNKS = {"recurrent_gemma", "rwkv", "xlstm"} | (
    set() if NAME == "cache" else {"mamba", "mamba2", "falcon_mamba"}
)


def whole_logits(name: str, cp: ContextParallel) -> torch.Tensor:
    """The logits of a text that comes in turns of several lengths."""
    model, kept, found = prepare(build(FAMILIES[name]).eval()), RingCache(cp), []
    with torch.no_grad():
        for part in PROMPT.split([20, 1, 3, 1, 16], 1):
            given = {"use_cache": True, NAME: kept}
            found.append(model(part, **given).logits)
    kept.finish()
    return torch.cat(found, 1)


def on_ring(rank: int, names: Sequence[str], ways: Sequence[str]) -> dict[Any, Any]:
    """What this rank has of every family."""
    cp = ContextParallel(dist.group.WORLD) if dist.is_initialized() else ContextParallel()
    found: dict[Any, Any] = {}
    for name in names:
        model = prepare(build(FAMILIES[name]).eval())

        def ask(ids: torch.Tensor, mask: torch.Tensor, *, model: Any = model, **options: Any) -> Told:
            return asked(model, ids, mask, **options)

        for way in (way for way in ways if way != "chunks" or name not in WITHOUT_CHUNKS):
            found[name, way] = WAYS[way](ask, lambda: {NAME: RingCache(cp)})
        found[name, "logits"] = whole_logits(name, cp)
    return found


@cache
def truth(name: str, way: str) -> dict[str, Told]:
    model = build(FAMILIES[name]).eval()
    return WAYS[way](lambda ids, mask, **options: of_rows(model, ids, mask, **options), dict)


@pytest.mark.parametrize(
    ("ranks", "names", "ways"),
    [(1, tuple(FAMILIES), ("turns", "chunks")), (2, tuple(FAMILIES), ("greedy",)), (4, FEW, tuple(WAYS))],
    ids=["1", "2", "4"],
)
def test_tokens_and_logits_equal_those_of_one_rank(ranks: int, names: Sequence[str], ways: Sequence[str]) -> None:
    by_rank = [on_ring(0, names, ways)] if ranks == 1 else run_ranks(on_ring, ranks, names, ways, timeout_s=300.0)
    failed = []
    for name in names:
        with torch.no_grad():
            expected = build(FAMILIES[name]).eval()(PROMPT, use_cache=False).logits
        for found in by_rank:
            torch.testing.assert_close(found[name, "logits"], expected, rtol=2e-5, atol=2e-5, msg=name)
        for way in (way for way in ways if (name, way) in by_rank[0]):
            for key, (tokens, logits) in truth(name, way).items():
                for rank, found in enumerate(by_rank):
                    same, close = found[name, way][key]
                    error = float((close - logits).abs().max()) if torch.equal(same, tokens) else float("inf")
                    if error > 1e-5 * float(logits.abs().max()) or not torch.equal(
                        close, by_rank[0][name, way][key][1]
                    ):
                        failed.append((name, key, rank, error))
    assert not failed


# ------------------------------------------------------------------------------------------------------ refused


def made(name: str) -> tuple[Any, RingCache]:
    """A model on a ring of one rank, and a cache that has a prompt with padding."""
    model, kept = prepare(build(FAMILIES[name]).eval()), RingCache(ContextParallel())
    with torch.no_grad():
        model(PROMPT * PADDING, attention_mask=PADDING, **{NAME: kept})
    return model, kept


def test_states_cannot_go_back() -> None:
    model, kept = made("qwen3_next")
    with pytest.raises(
        ValueError, match=r"crop\(-1\) is not possible: the states of recurrent layers cannot go back"
    ):
        kept.crop(-1)
    with pytest.raises(ValueError, match="assisted_generation drops drafted tokens that are not accepted, and"):
        asked(model, PROMPT[:1], torch.ones_like(PROMPT[:1]), prompt_lookup_num_tokens=3, **{NAME: kept})


def test_padding_after_the_first_token_is_refused() -> None:
    for name in ("qwen3_next", "mamba"):
        model, kept = made(name)
        more = torch.cat([PADDING, torch.tensor([[0, 1], [1, 1]])], 1)
        torn = PADDING.clone()
        torn[1, 20] = 0
        with torch.no_grad():
            with pytest.raises(ValueError, match="attention_mask has padding after the first token of a row"):
                model(PROMPT[:, :2], attention_mask=more, **{NAME: kept})
            with pytest.raises(ValueError, match="attention_mask has padding after the first token of a row"):
                model(PROMPT, attention_mask=torn, **{NAME: RingCache(ContextParallel())})
        assert kept.lengths == (28, 41)


def test_pieces_of_a_prompt_that_xlstm_would_evaluate_by_themselves_are_refused() -> None:
    config = copy.deepcopy(FAMILIES["xlstm"])
    config.max_inference_chunksize = 16
    model = prepare(build(config)).eval()
    with torch.no_grad(), pytest.raises(ValueError, match="in pieces of max_inference_chunksize=16 tokens"):
        model(PROMPT, **{NAME: RingCache(ContextParallel())})


def test_what_is_refused_leaves_states_and_what_fails_forgets_them() -> None:
    for name in FEW:
        model, kept = made(name)
        same, more = copy.deepcopy(kept), torch.ones(2, 42, dtype=torch.int64)
        with torch.no_grad():
            with pytest.raises(ValueError, match="attention_mask hides other tokens"):
                model(PROMPT[:, :1], attention_mask=more, **{NAME: kept})
            mask = torch.cat([PADDING, torch.ones(2, 1, dtype=torch.int64)], 1)
            given, expected = (
                model(PROMPT[:, :1], attention_mask=mask, **{NAME: each}).logits for each in (kept, same)
            )
            assert torch.equal(given, expected), name
            norm = next(
                module for module in reversed(list(model.modules())) if "norm" in type(module).__name__.lower()
            )
            handle = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
            with pytest.raises(OSError, match="the disk is full"):
                model(PROMPT[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), **{NAME: kept})
            handle.remove()
            assert kept.lengths == (), name
            again = model(PROMPT * PADDING, attention_mask=PADDING, **{NAME: kept}).logits
            first = model(PROMPT * PADDING, attention_mask=PADDING, **{NAME: RingCache(ContextParallel())}).logits
            assert torch.equal(again, first), name


def test_states_do_not_grow_with_the_text() -> None:
    model, kept = made("mamba2")
    before = kept.bytes
    with torch.no_grad():
        model(PROMPT, attention_mask=torch.cat([PADDING, torch.ones_like(PADDING)], 1), **{NAME: kept})
    assert kept.bytes == before > 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "mamba2"])
def test_convolutions_of_a_turn_are_given_no_more_than_kernels_can_count(name: str) -> None:
    """As in training: a kernel counts elements in 32 bits."""
    convolve, shapes = torch.nn.functional.conv1d, list[torch.Size]()
    mask = torch.cat([PADDING, torch.ones_like(PROMPT)], 1)

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(x.shape)
        return convolve(x, *args, **kwargs)

    def told(offsets: int) -> torch.Tensor:
        shapes.clear()
        with mock.patch.object(segments, "OFFSETS", offsets), torch.no_grad():
            model, kept = made(name)
            logits: torch.Tensor = model(PROMPT, attention_mask=mask, **{NAME: kept}).logits
        return logits

    with mock.patch.object(torch.nn.functional, "conv1d", counted), mock.patch.object(segments, "STEP", 4):
        expected = told(2**31)
        longest, channels = max(shape[0] * shape[2] for shape in shapes), shapes[0][1]
        found = told(20 * channels)

    assert longest > 80
    assert max(shape[0] * shape[2] for shape in shapes) < 20
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_states_are_of_the_type_that_transformers_computes_with() -> None:
    """MiniMax's next token is computed in the type of its hidden states, with a loss that one rank has as well."""
    usual, ring = (build(FAMILIES["minimax"]).eval().bfloat16() for _ in range(2))
    tokens, logits = asked(usual, PROMPT, torch.ones_like(PROMPT))
    same, close = asked(prepare(ring), PROMPT, torch.ones_like(PROMPT), **{NAME: RingCache(ContextParallel())})
    assert torch.equal(same, tokens)
    torch.testing.assert_close(close, logits, rtol=0.0, atol=0.06)
