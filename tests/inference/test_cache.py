"""`KVCache` over several turns, judged by one process in float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from burst_plugin import (
    BidirectionalSpans,
    Causal,
    ContextParallel,
    PerHeadGroup,
    PerRow,
    PrefixLM,
    Scores,
    SlidingWindow,
    Strategy,
    Topology,
)
from burst_plugin.inference import KVCache, decode_bytes, pass_q_share
from burst_plugin.kernels import How
from burst_plugin.kernels.torch_cpu import TorchCpuKernel
from tests.support.ranks import run_ranks
from tests.support.turns import Conversation, RanksInOne, Told, held_by_rank

# A prompt, tokens one by one, a few at once, another prompt, a token; rows alike, and rows unlike, that may rest.
ALIKE = ((37, 37), (1, 1), (1, 1), (3, 3), (23, 23), (1, 1))
UNLIKE = ((37, 20), (1, 1), (1, 0), (3, 2), (23, 40), (0, 17), (1, 1))
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # turns, of the conversation, of the cache
    "alike": (ALIKE, {}, {}),
    "unlike": (UNLIKE, {}, {}),
    "float32": (UNLIKE, {"dtype": torch.float32}, {"reserve": 50}),
    "bfloat16": (UNLIKE, {"dtype": torch.bfloat16}, {}),
    "pass-Q": (UNLIKE, {}, {"forward": "q"}),
    "v wider": (ALIKE, {"dims": (8, 12)}, {"forward": "kv"}),
    "one head of keys, a sink": (ALIKE, {"heads": (6, 1), "sink": True}, {}),
    "softcap": (UNLIKE, {"scores": Scores(scale=0.5, softcap=2.0)}, {}),
    "window": (UNLIKE, {"mask": SlidingWindow(9)}, {}),
    "window that is all that is kept": (ALIKE, {"mask": SlidingWindow(9)}, {"windows": [9], "reserve": 1000}),
    "offloaded": (UNLIKE, {}, {"offload": True}),
    "windows of unlike rows": (UNLIKE, {"mask": SlidingWindow(11)}, {"windows": [11], "rewind": 3}),
    "masks of rows": (UNLIKE, {"mask": PerRow((Causal(), PrefixLM(5)))}, {}),
    "spans": (
        UNLIKE,
        {"mask": PerRow((BidirectionalSpans(((0, 2), (3, 5)), (7, 7)), BidirectionalSpans(((1, 5),))))},
        {},
    ),
}
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 0.02}
OVER_GLOO = ("alike", "unlike", "one head of keys, a sink")


def told(name: str, cp: ContextParallel) -> Told:
    turns, drawn, options = CASES[name]
    return Conversation.draw(turns, **drawn).tell(cp, KVCache(cp, 1, **options))


@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_exact(name: str) -> None:
    found = told(name, ContextParallel())
    assert found.error < BOUNDS[CASES[name][1].get("dtype", torch.float64)]
    assert found.sent == [{"intra": 0, "inter": 0}] * len(CASES[name][0])


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 3), Topology(1, 8)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_in_one_process_are_exact_and_the_same_to_the_bit(name: str, topology: Topology) -> None:
    turns, drawn, options = CASES[name]
    if drawn.get("sink"):
        drawn = {**drawn, "sink": False}  # which is added to what is merged
    conversation, bound = Conversation.draw(turns, **drawn), BOUNDS[drawn.get("dtype", torch.float64)]
    ranks, left = RanksInOne(topology, forward=options.get("forward", "auto")), options.get("windows", [None])[0]
    assert ranks.tell(conversation, left=left) < bound
    if topology.ranks < 4:
        assert ranks.tell(conversation, replicated=True, left=left) < bound
        assert ranks.tell(conversation, replicated=False, left=left) < bound


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 2)])
def test_heads_may_be_exchanged_on_the_ring(topology: Topology) -> None:
    told = Conversation.draw(UNLIKE)
    assert RanksInOne(topology, Strategy(ulysses_degree=2)).tell(told, replicated=False) < 1e-14


@pytest.mark.parametrize(("new", "side"), [(40, "q"), (50, "q"), (66, "kv"), (200, "kv")])
def test_the_side_moves_that_sends_fewer_bytes(new: int, side: str) -> None:
    """The share of new tokens beside 64 cached ones is below 0.47, or above it."""
    conversation = Conversation.draw(((64,), (new,)), dtype=torch.float32)
    share = pass_q_share(4, 2, 8, 8, torch.float32)
    assert share == 2 * 16 * 4 / (4 * (8 * 4 + 9 * 4))
    assert (new / (64 + new) < share) == (side == "q")
    sent = {}
    for forward in ("q", "kv", "auto"):
        ranks = RanksInOne(Topology(2, 2), forward=forward)
        ranks.tell(conversation, replicated=False)
        sent[forward] = ranks.last_turn_bytes
    assert sent["auto"] == sent[side] == min(sent.values()) < max(sent.values())


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (4, 2)])
def test_ranks_are_exact_even_and_send_what_the_formula_says(ranks: int, per_node: int) -> None:
    def on_rank(rank: int) -> dict[str, Told]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=per_node)
        found = {name: told(name, cp) for name in OVER_GLOO}
        cp.close()
        return found

    by_rank = run_ranks(on_rank, ranks, timeout_s=120.0)
    for name in OVER_GLOO:
        turns, drawn, _ = CASES[name]
        lengths = [sum(row) for row in zip(*turns, strict=True)]
        heads, dims = drawn.get("heads", (4, 2)), drawn.get("dims", (8, 8))
        for rank, found in enumerate(each[name] for each in by_rank):
            assert found.error < BOUNDS[torch.float64], name
            assert torch.equal(found.out, by_rank[0][name].out), name
            assert found.held == held_by_rank(lengths, rank, ranks) * heads[1] * sum(dims) * 8, name
            one_token = decode_bytes(
                Topology(ranks // per_node, per_node), rank, (2, 1, heads[0], dims[1]), torch.float64
            )
            assert [found.sent[1], found.sent[-1]] == [one_token, one_token], name  # whatever is cached by then


def test_truncated_and_forked_caches_go_on_exactly() -> None:
    """A prefix is cut off, told again with another end, and two copies of one row go on differently."""
    first, second = (Conversation.draw(turns) for turns in (((30, 30), (1, 1)), ((30, 30), (9, 9), (1, 1))))

    def on_rank(rank: int) -> list[float]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        cache = KVCache(cp, 2)
        with cp.profile() as profile:
            errors = [first.tell(cp, cache, layers=2).error]
        merges = [each for each in profile.events if each.direction == "merge"]
        assert {each.kind for each in merges} == {"kernel", "post", "wait"}
        assert "merge" in str(profile)
        posted = sum(each.sent_bytes for each in profile.events)
        assert posted == sum(cache.bytes_sent.values())
        cache.truncate([0, 0])
        errors.append(second.tell(cp, cache, layers=2).error)
        cache.truncate([21, 17])
        forked = cache.fork([1, 0, 1])
        cache.truncate([5, 5])
        assert forked.lengths == (17, 21, 17)
        starts, lengths = forked.lengths, (4, 12, 3)
        turn = forked.begin(lengths)
        problem = [x[[1, 0, 1]] for x in (*second.problem[:3], second.truth)]
        new = [second.of_turn(x, starts, lengths) for x in problem]
        for layer in range(2):
            out = forked.gather(forked.attend(layer, *(turn.take(x) for x in new[:3])))
        errors.append(float((out - new[3].nan_to_num(0.0)).abs().max()))
        last = torch.stack([x[n - 1] for x, n in zip(new[3], lengths, strict=True)])
        assert torch.equal(forked.gather(turn.take(new[3]), last=True), last)
        cp.close()
        return errors

    for errors in run_ranks(on_rank, 4, timeout_s=120.0):
        assert max(errors) < 1e-14


def _goes_apart(cp: ContextParallel, how: str) -> None:
    """Go through three turns, in which rank 1 does something else."""
    cache, odd = KVCache(cp, 1), cp.rank == 1
    x = torch.ones(1, 1, 2, 4)
    if how == "a shape on the ring":
        x = torch.ones(1, cache.begin([20]).size + odd, 2, 4)
        cache.attend(0, x, x, x)
    if how == "a fork":
        pair = x.expand(2, -1, -1, -1)
        cache.begin([1, 1])
        cache.attend(0, pair, pair, pair)
        cache = cache.fork([0 + odd])
    for step in range(3):
        if how == "an early stop" and odd and step == 2:
            cache.finish()
        if how == "a truncation" and odd and step == 1:
            cache.truncate([0])
        token = 7 + (how == "a token" and odd and step == 1)
        cache.begin([2 if how == "a number" and odd else 1], ids=torch.tensor([[token]]))
        cache.attend(int(how == "a layer" and odd), *[x[..., : 3 if how == "a shape" and odd else 4]] * 3)
    cache.finish()


@pytest.mark.parametrize("windows", [None, [9]])
def test_a_prefix_that_rows_share_is_stored_once(windows: list[int] | None) -> None:
    turns = ((40, 40, 40), (1, 1, 1), (3, 2, 0), (20, 11, 9), (1, 1, 1))
    told = Conversation.draw(turns, mask=SlidingWindow(9) if windows else Causal(), same=40)

    def on_rank(rank: int) -> tuple[float, int, int]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2) if dist.is_initialized() else ContextParallel()
        prefix = KVCache(cp, 1, windows=windows)
        error = told.of_rows(1, turns[:1]).tell(cp, prefix).error
        cache = prefix.fork([0, 0, 0], shared=True)
        held = cache.bytes
        error = max(error, told.of_rows(3, turns[1:]).tell(cp, cache).error)
        with pytest.raises(ValueError, match="shared by all rows" if windows is None else "has a window of 9"):
            cache.truncate([39, 39, 39])
        cp.close()
        return error, prefix.bytes, held

    for error, prefix, held in [on_rank(0), *run_ranks(on_rank, 4, timeout_s=120.0)]:
        assert error < 1e-14
        assert held == prefix * (1 if windows is None else 3)


def test_a_prefix_is_read_once_for_all_rows() -> None:
    told = Conversation.draw(((40,) * 6, (1,) * 6), same=40)
    kernel = CountingKernel()
    cp = ContextParallel(kernel=kernel)
    prefix = KVCache(cp, 1)
    told.of_rows(1, told.turns[:1]).tell(cp, prefix)
    for shared, keys in ((True, 40 + 6), (False, 6 * 41)):
        cache, kernel.keys = prefix.fork([0] * 6, shared=shared), 0
        told.of_rows(6, told.turns[1:]).tell(cp, cache)
        assert kernel.keys == keys
    cache = prefix.fork([0] * 6, shared=True)
    x = torch.ones(6, cache.begin([1] * 6).size, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="hides some of the 40 tokens that rows share"):
        cache.attend(0, x, x[:, :, :2], x[:, :, :2], mask=SlidingWindow(5))
    cache.attend(0, x, x[:, :, :2], x[:, :, :2])
    with pytest.raises(ValueError, match="list a single row, and of a cache whose rows share nothing"):
        cache.fork([0, 1], shared=True)
    assert cache.fork([3, 5]).lengths == (41, 41)


class CountingKernel(TorchCpuKernel):
    """Counts the keys that it reads."""

    name = "counting"
    keys = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        self.keys += k.shape[0] * k.shape[1]
        return super().forward(q, k, v, how)


APART = {
    "a token": "rank 1: ids=torch.int64 (8,)",
    "a number": "rank 1: new tokens=(2,)",
    "an early stop": "of the end of the turns of a cache",
    "a truncation": "cached tokens=(0,)",
    "a fork": "truncated and forked=",
    "a layer": "rank 1: layer=1 is not one of the cache's 1 layers",
    "a shape": "qk_dim=3",
    "a shape on the ring": "rank 1 has 10 new tokens in each of 1 rows",
}


def test_ranks_that_disagree_end_with_an_error() -> None:
    def on_rank(rank: int) -> dict[str, str]:
        cp = ContextParallel(dist.group.WORLD, ranks_per_node=2)
        said = {}
        for how in APART:
            with pytest.raises(ValueError, match=r".") as error:
                _goes_apart(cp, how)
            said[how] = str(error.value)
        cp.close()
        return said

    for said in run_ranks(on_rank, 2):
        for how, text in APART.items():
            assert text in said[how]


def test_a_cache_is_used_as_turns_say() -> None:
    cache, x = KVCache(ContextParallel(kernel="torch_cpu"), 2), torch.ones(2, 1, 2, 4)
    with pytest.raises(ValueError, match="no turn has begun"):
        cache.attend(0, x, x, x)
    for lengths in ([], [0, 0], [1, -1], [1.5, 1]):
        with pytest.raises(ValueError, match="begin"):
            cache.begin(lengths)  # type: ignore[arg-type]
    cache.begin([1, 1])
    with pytest.raises(ValueError, match="it lacks: softcap"):  # noticed when the tokens are in the cache
        cache.attend(0, x, x, x, scores=Scores(softcap=1.0))
    assert cache.bytes == 0
    with pytest.raises(ValueError, match="no alibi_slopes and no dropout"):
        cache.attend(0, x, x, x, scores=Scores(dropout=0.5, seed=0))
    cache.attend(0, x, x, x)
    with pytest.raises(ValueError, match="layer 0 has attended in this turn already"):
        cache.attend(0, x, x, x)
    with pytest.raises(ValueError, match="layers 1 did not attend in turn 0"):
        cache.begin([1, 1])
    with pytest.raises(ValueError, match="one number per row, up to its length"):
        cache.truncate([2, 1])
    with pytest.raises(ValueError, match=r"rows of \(0, 0\) tokens, before the turn that was left half way"):
        cache.truncate([1, 0])  # which layer 1 does not have
    cache.truncate([0, 0])
    with pytest.raises(ValueError, match="does not fit the 2 rows that are cached"):
        cache.begin([1])
    cache.begin([1, 1])
    with pytest.raises(ValueError, match="float64"):
        cache.attend(0, x.double(), x.double(), x.double())
    cache.attend(0, x, x, x)
    assert cache.lengths == (1, 1)


def test_offloaded_layers_are_on_the_device_one_ahead() -> None:
    told = Conversation.draw(((40, 20), (1, 1), (30, 30), (1, 1)))
    cache = KVCache(ContextParallel(), 4, offload=True)
    for turn in told.turns:
        new = cache.begin(turn)
        for layer in range(4):
            out = cache.attend(**told.asked(new)._replace(layer=layer)._asdict())
            there = [each.store.fetched_bytes > 0 for each in cache._layers]  # type: ignore[attr-defined]
            assert not any(there) or there == [n == (layer + 1) % 4 for n in range(4)]
            assert told.error(out, new.starts, turn) < 1e-14
    assert there == [True, False, False, False]  # for the next turn
    cache.truncate([71, 51])
    again = told.of_rows(2, told.turns[-1:])
    assert again.tell(ContextParallel(), cache.fork(), layers=4).error < 1e-14
    assert again.tell(ContextParallel(), cache, layers=4).error < 1e-14
    cache.truncate([5, 3])  # of what was on its way, and is laid out anew
    assert again.tell(ContextParallel(), cache, layers=4).error < 1e-14


@pytest.mark.parametrize("offload", [False, True])
def test_turns_in_and_out_of_inference_mode_mix(offload: bool) -> None:
    told = Conversation.draw(((5,), (1,), (2,), (1,)))
    cache = KVCache(ContextParallel(), 2, offload=offload)
    for number, lengths in enumerate(told.turns):
        with torch.inference_mode(number % 2 == 0):
            turn = cache.begin(lengths)
            for layer in range(2):
                out = cache.attend(**told.asked(turn)._replace(layer=layer)._asdict())
                assert told.error(out, turn.starts, lengths) < 1e-14


@pytest.mark.parametrize("offload", [False, True])
def test_a_refused_layer_leaves_no_type_and_no_heads_behind(offload: bool) -> None:
    """That it is refused is noticed when its tokens are in the cache; others may follow then."""
    cache, x = KVCache(ContextParallel(kernel="torch_cpu"), 1, offload=offload, reserve=9), torch.ones(1, 1, 2, 4)
    cache.begin([1])
    with pytest.raises(ValueError, match="it lacks: softcap"):
        cache.attend(0, x, x, x, scores=Scores(softcap=1.0))
    assert cache.allocated_bytes == 0
    other = torch.ones(1, 1, 6, 8, dtype=torch.float64)
    assert torch.equal(cache.attend(0, other, other, other), other)
    cache.begin([1])
    with pytest.raises(ValueError, match="it lacks: softcap"):
        cache.attend(0, other, other, other, scores=Scores(softcap=1.0))
    with pytest.raises(
        ValueError, match=r"k has type, device, heads and head dim .*float32.* but the cache .*float64"
    ):
        cache.attend(0, x, x, x)
    assert torch.equal(cache.attend(0, other, other, other), other)


def test_copies_of_a_cache_go_on_by_themselves_and_it_is_not_pickled() -> None:
    told = Conversation.draw(((5,), (1,)))
    cache = KVCache(ContextParallel(), 1)
    told.of_rows(1, told.turns[:1]).tell(ContextParallel(), cache)
    for copied in (copy.copy(cache), copy.deepcopy({"cache": cache})["cache"], cache):
        assert told.of_rows(1, told.turns[1:]).tell(ContextParallel(), copied).error < 1e-14
        assert copied.lengths == (6,)
    with pytest.raises(TypeError, match="a KVCache cannot be saved or sent to another process"):
        pickle.dumps(cache)
    cache.begin([1])
    with pytest.raises(ValueError, match="layers 0 did not attend"):
        copy.copy(cache)


@pytest.mark.parametrize("offload", [False, True])
def test_rows_that_share_a_prefix_have_the_rest_of_its_reserve(offload: bool) -> None:
    told = Conversation.draw(((98,) * 4, (2,) * 4), same=98)
    prefix = KVCache(ContextParallel(), 1, reserve=100, offload=offload)
    told.of_rows(1, told.turns[:1]).tell(ContextParallel(), prefix)
    token = 2 * (8 + 8) * 8
    assert prefix.allocated_bytes == 100 * token
    cache = prefix.fork([0] * 4, shared=True)
    assert cache.allocated_bytes == (98 + 4 * 2) * token
    assert told.of_rows(4, told.turns[1:]).tell(ContextParallel(), cache).error < 1e-14
    assert cache.allocated_bytes == (98 + 4 * 2) * token


def test_a_mask_by_groups_of_heads_is_refused() -> None:
    cache, x = KVCache(ContextParallel(), 1), torch.ones(1, 1, 2, 4)
    cache.begin([1])
    with pytest.raises(ValueError, match="is for 2 groups of heads, but a KVCache has one mask for all heads"):
        cache.attend(0, x, x, x, mask=PerHeadGroup((Causal(), SlidingWindow(3))))


def test_windows_keep_what_they_need_and_can_be_rewound_so_far() -> None:
    cache = KVCache(ContextParallel(), 2, windows=[64, None], rewind=8)
    for count in (1000, *[1] * 100):
        x = torch.randn(1, cache.begin([count]).size, 2, 4)
        for layer in range(2):
            cache.attend(layer, x, x, x, mask=Causal())
    token = 2 * 2 * 4 * 4
    assert 1100 + 64 + 8 <= cache.bytes / token < 1100 + 64 + 8 + 16
    assert cache.allocated_bytes < 1.5 * cache.bytes
    with pytest.raises(ValueError, match="cannot be cut to 1000 tokens: layer 0 has a window of 64"):
        cache.truncate([1000])
    assert cache.lengths == (1100,)
    first = cache._layers[0].first_keys[0]
    with pytest.raises(ValueError, match=f"dropped what comes before token {first}"):
        cache.truncate([first + 63])
    cache.fork().truncate([first + 64])
    cache.truncate([1092])
    assert cache.bytes / token >= 1092 + 64
    cache.truncate([0])
    assert cache.bytes == 0
    x, fresh = torch.randn(1, 80, 2, 4), KVCache(ContextParallel(), 1)
    for each in (cache, fresh):
        each.begin([80])
    assert torch.equal(cache.attend(0, x, x, x), fresh.attend(0, x, x, x, mask=SlidingWindow(64)))
    with pytest.raises(ValueError, match="give for each of 2 layers a number of tokens"):
        KVCache(ContextParallel(), 2, windows=[3])


def test_gradients_are_refused() -> None:
    """They would be lost without a word."""
    cache, x = KVCache(ContextParallel(), 1), torch.ones(1, 1, 2, 4)
    trained = x.clone().requires_grad_()
    cache.begin([1])
    for asked in ((trained, x, x), (x, trained, x), (x, x, trained)):
        with pytest.raises(RuntimeError, match=r"KVCache.attend has no gradient; call it under torch.no_grad\(\)"):
            cache.attend(0, *asked)
    with pytest.raises(RuntimeError, match="has no gradient"):
        cache.attend(0, x, x, x, sink=torch.zeros(2, requires_grad=True))
    with torch.no_grad():
        assert not cache.attend(0, trained, trained, trained, sink=torch.zeros(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("extras", [{}, {"scores": Scores(softcap=30.0)}, {"sink": torch.zeros(2)}], ids=str)
def test_autocast_of_the_caller_does_not_reach_a_turn(extras: dict[str, Any]) -> None:
    drawn = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 64, 2, 16, generator=drawn) for _ in range(3)]

    def out(autocast: bool) -> torch.Tensor:
        cache = KVCache(ContextParallel(kernel="reference"), 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            cache.begin([64], replicated=True)
            return cache.attend(0, *qkv, **extras)

    assert torch.equal(out(True), out(False))
