"""`generate` with a `RingCache` on four ranks against the same on one rank with transformers' own cache.

`BURST_SOAK=1 bash tests/run.sh tests/huggingface/test_generation.py` generates more tokens.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Cache, Phi3Config, PhimoeConfig, StoppingCriteria, StoppingCriteriaList

from burst_plugin import Causal, ContextParallel, Scores, Topology
from burst_plugin.huggingface import RingCache, prepare
from burst_plugin.huggingface.generation import name_of_cache, ring_for_generation
from burst_plugin.huggingface.mask_recipes import MaskRecipe
from burst_plugin.inference import decode_bytes
from tests.support.deepspeed_run import VOCAB, Run, build, llama
from tests.support.families import families
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.huggingface

RANKS, PER_NODE = 4, 2
MANY = 200 if os.environ.get("BURST_SOAK") else 80  # so many that ranks make room again
NAME = name_of_cache()
FAMILIES = families()
LIKE = ("llama", "qwen3", "gemma3", "deepseek_v3")  # what the ring is for
PROMPT = torch.randint(1, VOCAB, (2, 50), generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[0] * 17 + [1] * 33, [1] * 50])


def model_of(name: str) -> Any:
    return build(Run(model=FAMILIES[name])).eval()


def generated(model: Any, ids: torch.Tensor, steps: int, cache: RingCache | None = None, **options: Any) -> Any:
    """What `generate` returns with logits; greedy, as many tokens as steps."""
    usual = {"do_sample": False, "max_new_tokens": steps, "pad_token_id": 0, "eos_token_id": None}
    usual |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": torch.ones_like(ids)}
    given = {} if cache is None else {NAME: cache}
    return model.generate(ids, **{**usual, **options}, **given)


def on_ring(fn: Callable[[ContextParallel], Any], timeout_s: float = 120.0) -> list[Any]:
    """What `fn` returns on each of four ranks, two per node."""

    def on_rank(rank: int) -> Any:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=PER_NODE)
        found = fn(cp)
        cp.close()
        return found

    return run_ranks(on_rank, RANKS, timeout_s=timeout_s)


def held_bytes(config: Any, rank: int, tokens: int) -> tuple[int, int]:
    """The fewest and the most that a rank may hold: its share of all tokens, or of a window and a few more."""
    if hasattr(config, "kv_lora_rank"):
        width = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    else:
        width = config.num_key_value_heads * 2 * (getattr(config, "head_dim", None) or 8)
    own, bounds = len(range(rank, tokens, RANKS)), [0, 0]
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for layer in range(config.num_hidden_layers):
        slides = window is not None and (kinds is None or kinds[layer] == "sliding_attention")
        least, most = (window // RANKS, -(-(window + 16) // RANKS)) if slides else (own, own)
        bounds = [bound + len(PROMPT) * n * width * 4 for bound, n in zip(bounds, (least, most), strict=True)]
    return bounds[0], bounds[1]


def check_greedy(steps: dict[str, int]) -> None:
    """Compare tokens and logits of models, by name, over so many steps; bytes held and sent with formulas."""

    def tell(cp: ContextParallel) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, count in steps.items():
            model, cache, sent = prepare(model_of(name)), RingCache(cp), []
            told = generated(model, PROMPT, count, cache)
            for _ in range(2):  # a token each
                before = cache.bytes_sent
                with torch.no_grad():
                    model(told.sequences[:, -1:], **{NAME: cache})
                sent.append({link: n - before[link] for link, n in cache.bytes_sent.items()})
            cache.finish()
            found[name] = told.sequences, torch.stack(told.logits), cache.bytes, sent
        return found

    by_rank = on_ring(tell, timeout_s=120.0 + sum(steps.values()))
    for name, count in steps.items():
        truth, config = generated(model_of(name), PROMPT, count), FAMILIES[name]
        assert by_rank[0][name][0].shape[1] == PROMPT.shape[1] + count
        held = [found[name][2] for found in by_rank]
        tokens = PROMPT.shape[1] + count + 1
        v_dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or 8
        for rank, found in enumerate(each[name] for each in by_rank):
            sequences, logits, _, sent = found
            assert torch.equal(sequences, truth.sequences), (name, rank)
            torch.testing.assert_close(logits, torch.stack(truth.logits), rtol=2e-5, atol=2e-5, msg=name)
            assert torch.equal(logits, by_rank[0][name][1]), (name, rank)
            fewest, most = held_bytes(config, rank, tokens)
            assert fewest <= held[rank] <= most, (name, held)
            shape = len(PROMPT), 1, config.num_attention_heads, v_dim
            formula = decode_bytes(Topology(RANKS // PER_NODE, PER_NODE), rank, shape)
            assert sent == [{link: config.num_hidden_layers * n for link, n in formula.items()}] * 2, name


def test_greedy_tokens_and_logits_equal_those_of_one_rank() -> None:
    check_greedy({"llama": MANY, **dict.fromkeys(("mistral", "gemma2", "gpt_oss", "phi", "phi3"), 12)})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LIKE if name != "llama"])
def test_greedy_tokens_over_many_steps(name: str) -> None:
    check_greedy({name: MANY})


def assistant() -> Any:
    return build(Run(model=llama(hidden_size=16, num_attention_heads=2))).eval()


# By name: what is generated, given the model and a function that makes a cache.
WAYS: dict[str, Callable[[Any, Callable[[], RingCache | None]], list[Any]]] = {
    "padded": lambda model, cache: [
        generated(model, PROMPT * PADDING, 8, cache(), attention_mask=PADDING),
    ],
    "beams": lambda model, cache: [
        generated(model, PROMPT, 6, cache(), num_beams=3, num_return_sequences=2),
        generated(model, PROMPT * PADDING, 6, cache(), attention_mask=PADDING, num_beams=2, eos_token_id=5),
    ],
    "samples": lambda model, cache: [
        torch.manual_seed(5) and generated(model, PROMPT, 8, cache(), do_sample=True, num_return_sequences=2),
        torch.manual_seed(6) and generated(model, PROMPT, 4, cache(), do_sample=True, num_beams=2),
    ],
    "assisted": lambda model, cache: [
        generated(model, PROMPT[:1], 8, cache(), prompt_lookup_num_tokens=3),
        generated(model, PROMPT[:1], 8, cache(), assistant_model=assistant()),
    ],
    "in chunks": lambda model, cache: [
        generated(model, PROMPT, 4, cache(), prefill_chunk_size=17),
    ],
    "embeddings": lambda model, cache: [
        generated(model, PROMPT, 4, cache(), inputs_embeds=model.get_input_embeddings()(PROMPT).detach()),
    ],
}


def turns(model: Any, cache: RingCache | None) -> list[Any]:
    """Two questions about one prompt, which is kept, and a longer talk in one of the copies."""
    from transformers import DynamicCache

    first = cache if cache is not None else DynamicCache(config=model.config)
    positions = (PADDING.cumsum(1) - 1).clamp(min=0)  # as `generate` counts them
    with torch.no_grad():
        model(PROMPT * PADDING, attention_mask=PADDING, position_ids=positions, **{NAME: first})
    told = []
    for question in (7, 11):
        kept, ids, mask = copy.deepcopy(first), PROMPT * PADDING, PADDING
        for length in (9, 23)[: 1 + question // 10]:
            more = torch.full((2, length), question)
            ids, mask = (torch.cat([x, new], 1) for x, new in ((ids, more), (mask, torch.ones_like(more))))
            told.append(generated(model, ids, 4, attention_mask=mask, **{NAME: kept}))
            new = torch.ones(2, 4, dtype=torch.int64)
            ids, mask = told[-1].sequences, torch.cat([mask, new], 1)
    return told


def test_other_ways_of_generating_equal_those_of_one_rank() -> None:
    def tell(model: Any, cp: ContextParallel | None) -> dict[str, Any]:
        def cache() -> RingCache | None:
            return None if cp is None else RingCache(cp, reserve=20)

        found = {name: way(model, cache) for name, way in WAYS.items()} | {"turns": turns(model, cache())}
        return {name: [(x.sequences, torch.stack(x.logits)) for x in told] for name, told in found.items()}

    truth = tell(model_of("gemma3"), None)
    for found in on_ring(lambda cp: tell(prepare(model_of("gemma3")), cp)):
        for name, told in truth.items():
            for (sequences, logits), (expected, true) in zip(found[name], told, strict=True):
                assert torch.equal(sequences, expected), name
                torch.testing.assert_close(logits, true, rtol=2e-5, atol=2e-5, msg=name)


def test_all_logits_are_there_if_asked_for_and_every_generate_may_run_on_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tell(cp: ContextParallel) -> tuple[Any, ...]:
        model, cache = prepare(model_of("llama")), RingCache(cp)
        monkeypatch.delattr(MaskRecipe, "tensor")  # a mask of all tokens by all tokens
        with torch.no_grad():
            logits = model(PROMPT * PADDING, attention_mask=PADDING, **{NAME: cache}).logits
        before = sum(cp.traffic()["intra"].values())
        with ring_for_generation(cp):
            told = generated(model, PROMPT, 3)
        kinds = [type(x).__name__ for x in told.values()]
        return logits, told.sequences, "RingCache" in kinds, sum(cp.traffic()["intra"].values()) > before

    model, real = model_of("llama"), PADDING.bool()
    truth = model(PROMPT * PADDING, attention_mask=PADDING).logits
    for logits, sequences, *on_the_ring in on_ring(tell):
        torch.testing.assert_close(logits[real], truth[real], rtol=2e-5, atol=2e-5)
        assert torch.equal(sequences, generated(model, PROMPT, 3).sequences)
        assert on_the_ring == [True, True]


def test_only_the_last_columns_that_logits_are_asked_for_are_brought_together() -> None:
    ids, mask = torch.cat([PROMPT, PROMPT[:1]]), torch.cat([PADDING, torch.zeros_like(PADDING[:1])])
    mask[2, [20, 22, 49]] = 1  # a row with fewer tokens than there are ranks, and padding among them

    def tell(cp: ContextParallel | None) -> tuple[list[Any], list[torch.Tensor]]:
        model, sizes = model_of("llama") if cp is None else prepare(model_of("llama")), []
        model.base_model.register_forward_hook(lambda *args: sizes.append(list(args[2][0].shape)))

        def cache() -> RingCache | None:
            return None if cp is None else RingCache(cp)

        drafted, found = PROMPT[:1, :9].repeat(1, 4), []
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant()}):
            before = len(sizes)
            found.append(torch.stack(generated(model, drafted, 5, cache(), **options).logits))
            del sizes[before + 1 :]  # the first forward has the prompt and a draft
        for length, keep in ((50, 2), (50, 3), (50, 29), (50, 99), (7, 5)):  # the last one on every rank
            tokens = {"input_ids": ids[:, -length:], "attention_mask": mask[:, -length:]}
            tokens["position_ids"] = (tokens["attention_mask"].cumsum(1) - 1).clamp(min=0)
            with torch.no_grad():
                found.append(model(**tokens, **{NAME: cache()}, logits_to_keep=keep).logits)
        return sizes, found

    truth = tell(None)[1]
    for sizes, found in on_ring(tell):
        assert [size[1] for size in sizes] == [4, sizes[1][1], 2, 3, 29, 50, 5]
        assert 2 <= sizes[1][1] < 36
        for number, (logits, expected) in enumerate(zip(found, truth, strict=True)):
            real = mask[:, -logits.shape[1] :].bool() if number > 1 else torch.ones(logits.shape[:2]) > 0
            torch.testing.assert_close(logits[real], expected[real], rtol=2e-5, atol=2e-5)
            assert not logits[~real].any()


def test_threads_in_a_block_generate_on_the_ring() -> None:
    def tell(cp: ContextParallel | None) -> list[Any]:
        model, told = model_of("llama") if cp is None else prepare(model_of("llama")), []

        def generate() -> None:
            told.append(generated(model, PROMPT[:1], 3, assistant_model=assistant()))

        def in_thread() -> None:
            thread = Thread(target=generate)
            thread.start()
            thread.join()

        with ring_for_generation(cp):
            in_thread()
            with ring_for_generation(None):
                in_thread()
            generate()
        in_thread()
        return [(x.sequences, next(type(c).__name__ for c in x.values() if isinstance(c, Cache))) for x in told]

    truth = tell(None)
    for found in on_ring(tell):
        assert [kind for _, kind in found] == ["RingCache", "DynamicCache", "RingCache", "DynamicCache"]
        for (sequences, _), (expected, _) in zip(found, truth, strict=True):
            assert torch.equal(sequences, expected)


def growing(kind: type[Any]) -> Any:
    """A model that has other rotary embeddings in texts of more than 55 tokens."""
    lengths = {"original_max_position_embeddings": 55, "max_position_embeddings": 220}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [5.0, 4.0, 3.0, 2.0],
    }
    if kind is PhimoeConfig:
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None, "initializer_range": 0.15}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return build(Run(model=kind(rope_parameters={**rope, **lengths}, **lengths, **sizes, **heads, **ends))).eval()


def test_texts_that_outgrow_short_rotary_embeddings_stay_on_the_ring() -> None:
    def tell(cp: ContextParallel | None) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        found = []
        for kind in (Phi3Config, PhimoeConfig):
            model, sizes = growing(kind) if cp is None else prepare(growing(kind)), []
            model.base_model.layers[0].register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))  # noqa: B023
            for options in ({"attention_mask": PADDING}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
                ids = PROMPT[:1, :10].repeat(1, 5) if "prompt_lookup_num_tokens" in options else PROMPT
                given = options if cp is None else {**options, NAME: RingCache(cp)}
                told = generated(model, ids, 9, **given)
                found.append((told.sequences, torch.stack(told.logits), list(sizes)))
                sizes.clear()
        return found

    truth, by_rank = tell(None), on_ring(tell)
    for number, (sequences, logits, sizes) in enumerate(truth):
        assert max(sizes[1:]) > 50
        for found in by_rank:
            assert torch.equal(found[number][0], sequences)
            torch.testing.assert_close(found[number][1], logits, rtol=2e-5, atol=2e-5)
        for size, *of_ranks in zip(sizes, *(found[number][2] for found in by_rank), strict=True):
            assert sum(of_ranks) == (size if size > 2 * RANKS else size * RANKS)


def test_the_gpu_of_the_model_is_the_current_one_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(device: Any) -> None:
        raise RuntimeError(f"the current GPU is {device}")

    model = prepare(model_of("llama"))
    monkeypatch.setattr(torch.cuda, "device", of)
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 3))
    with pytest.raises(RuntimeError, match="the current GPU is cuda:3"):
        generated(model, PROMPT, 1, RingCache(ContextParallel()))


class Odd(StoppingCriteria):  # type: ignore[misc]
    """Stops, or fails, after four tokens on rank 1."""

    def __init__(self, rank: int, fails: bool) -> None:
        self.now, self.fails = rank == 1, fails

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = self.now and ids.shape[1] >= PROMPT.shape[1] + 4
        if done and self.fails:
            raise OSError("the disk is full")
        return torch.full((len(ids),), done)


def apart(how: str, cp: ContextParallel, model: Any) -> Any:
    """Generate where rank 1 does something else."""
    odd, ids = cp.rank == 1, PROMPT.clone()
    options: dict[str, Any] = {}
    torch.manual_seed(cp.rank)  # which greedy ranks need not have alike
    if how == "other seeds":
        options = {"do_sample": True}
    elif how == "another prompt" and odd:
        ids[0, 40] += 1
    elif how in ("stops", "fails"):
        options = {"stopping_criteria": StoppingCriteriaList([Odd(cp.rank, how == "fails")])}
    elif how == "another length" and odd:
        options = {"max_new_tokens": 5}
    elif how == "another mask":
        options = {"attention_mask": torch.ones_like(ids) if odd else PADDING}
    elif how == "pads on the right" and odd:
        options = {"attention_mask": PADDING.flip(1)}
    elif how == "another token":  # by a loop of one's own
        cache = RingCache(cp)
        with torch.no_grad():
            model(ids, **{NAME: cache})
            return model(ids[:, -1:] + odd, **{NAME: cache})
    return generated(model, ids, 8, RingCache(cp), **options)


APART = {
    "another prompt": "torch.manual_seed(n) on every rank before generate",
    "other seeds": "random numbers (torch.manual_seed(n) on every rank)=",
    "stops": "rank 1: before comparison",
    "fails": "rank 1: OSError('the disk is full')",
    "another length": '"max_new_tokens": 5',
    "another mask": "rank 1: new tokens=(50, 50)",
    "pads on the right": "rank 1: attention_mask has padding at the end of a row",
    "another token": "where ranks sample, they need the same random numbers",
}


def test_ranks_that_do_not_do_the_same_all_get_an_error() -> None:
    def tell(cp: ContextParallel) -> dict[str, str]:
        model, found = prepare(model_of("llama")), {}
        for how in APART:
            with pytest.raises(ValueError, match="rank 1: ") as raised:
                apart(how, cp, model)
            found[how] = str(raised.value)
        assert generated(model, PROMPT, 3, RingCache(cp)).sequences.shape[1] == 53  # the ring is as good as new
        return found

    for found in on_ring(tell):
        for how, text in APART.items():
            assert text in found[how], (how, found[how])


def refused(model: Any, **options: Any) -> str:
    """The error with which a ring of one rank refuses them."""
    with pytest.raises(ValueError, match="with a RingCache: ") as raised:
        generated(model, PROMPT, 3, RingCache(ContextParallel()), **options)
    return str(raised.value)


def test_what_is_not_right_on_a_ring_is_refused_by_name() -> None:
    model = prepare(model_of("llama"))
    assert "use_cache=False would compute all tokens again" in refused(model, use_cache=False)
    assert "max_time would stop each rank by its own clock" in refused(model, max_time=1.0)
    assert "contrastive_search is not supported" in refused(model, penalty_alpha=0.6, top_k=4)
    assert "output_hidden_states=True would return" in refused(model, output_hidden_states=True)
    assert "output_attentions=True would return" in refused(model, output_attentions=True)
    assert "prepare(model) first" in refused(model_of("llama"))
    with torch.no_grad(), pytest.raises(ValueError, match=r"prepare\(model\) first"):
        model_of("llama")(PROMPT, **{NAME: RingCache(ContextParallel())})
    with pytest.raises(ValueError, match=r"no gradients and no dropout; call model.eval\(\)"):
        model(PROMPT, **{NAME: RingCache(ContextParallel())})
    with torch.no_grad():
        cache = RingCache(ContextParallel())
        with pytest.raises(ValueError, match="labels would be compared with this rank's tokens"):
            model(PROMPT, labels=PROMPT, **{NAME: cache})
        model(PROMPT * PADDING, attention_mask=PADDING, **{NAME: cache})
        with pytest.raises(ValueError, match=r"needs an attention_mask \[2, 51\] of ones and zeros"):
            model(PROMPT[:, :1], **{NAME: cache})
        with pytest.raises(ValueError, match="attention_mask hides other tokens than when they were cached"):
            model(PROMPT[:, :1], attention_mask=torch.ones(2, 51), **{NAME: cache})
        mask = torch.cat([PADDING, torch.ones(2, 1)], 1)
        with pytest.raises(ValueError, match=r"do not count the tokens of each row from \[33, 50\] on"):
            model(PROMPT[:, :1], attention_mask=mask, position_ids=torch.zeros(2, 1), **{NAME: cache})
        assert cache.lengths == (33, 50)
    outgrown, cache = prepare(growing(Phi3Config)), RingCache(ContextParallel())
    generated(outgrown, PROMPT, 2, cache)
    with pytest.raises(
        ValueError, match="give generate input_ids of all tokens so far, and leave prefill_chunk_size"
    ):
        generated(outgrown, torch.cat([PROMPT, PROMPT], 1)[:, :60], 2, cache, attention_mask=torch.ones(2, 111))
    assert cache.lengths == (51, 51)
    x = torch.ones(2, 2, 1, 8)
    with pytest.raises(ValueError, match="keys and values that it did not store in the RingCache"):
        cache.attend("a layer", (x, x, x), Causal(), Scores(), None)
    with pytest.raises(ValueError, match=r"crop\(3\) is not valid; use -n to forget the last n tokens"):
        cache.crop(3)


def test_padding_that_counts_in_sliding_windows_is_refused_once_a_window_is_full() -> None:
    torn = torch.ones_like(PROMPT)
    torn[0, 3:5] = 0
    full = FAMILIES["gemma3"].sliding_window

    def logits(model: Any, length: int, **cache: Any) -> torch.Tensor:
        mask = torn[:, :length]
        positions = mask.cumsum(1) - 1
        with torch.no_grad():
            return model(PROMPT[:, :length], attention_mask=mask, position_ids=positions, **cache).logits[:, -1]

    model = prepare(model_of("gemma3"))
    cache = {NAME: RingCache(ContextParallel())}
    torch.testing.assert_close(logits(model, full, **cache), logits(model_of("gemma3"), full), rtol=2e-5, atol=2e-5)
    message = "padding after the first token of a row, which transformers counts in its sliding windows"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(PROMPT[:, :1], attention_mask=torn[:, : full + 1], **cache)
    with pytest.raises(ValueError, match=message):
        logits(model, full + 1, **{NAME: RingCache(ContextParallel())})
