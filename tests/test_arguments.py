"""Arguments of public names: what they may be made of, and what is refused, on one line that says what to write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burst_plugin import (
    BidirectionalSpans,
    BlockMask,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Keys,
    Mask,
    PerRow,
    PrefixLM,
    PrefixTree,
    Scores,
    SlidingWindow,
    Strategy,
    Tokens,
    Topology,
    VirtualRing,
    burst_attention,
    key_padding,
    recurrent,
    shard_batch,
)
from burst_plugin.checks import as_number, as_whole, shown
from burst_plugin.kernels import Case, Grads, How, Queries, TorchCpuKernel
from burst_plugin.sequence.mask import Region
from tests.support.ranks import last_lines, run_ranks
from tests.support.reference import Problem

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [
    None,
    "3",
    [3],
    (3,),
    {},
    True,
    NAN,
    INF,
    -INF,
    3j,
    torch.ones(2),
    torch.tensor(True),
    torch.tensor(NAN),
]
NOT_WHOLE = [*NO_NUMBERS, 1.5, 3.0, torch.tensor(3.0), -1]
NO_LISTS = [3, "08", b"08", True, {0, 8}, {0: 8}, torch.tensor([[0, 8], [0, 8]]), torch.tensor(8), Causal()]
NOT_WHOLE_LISTS = [*NO_LISTS, [0, 8.5], [0, "8"], [0, NAN], [0, INF], [0, True], [0, None], [[0, 8]], [0, -1]]
X = torch.zeros(1, 16, 2, 4)


class PlainMask(Mask):
    """A user's mask that is no dataclass."""

    def regions(self, q_len: int, kv_len: int) -> tuple[Region, ...]:
        return ()


@dataclass
class ChangeableMask(PlainMask):
    """A user's mask that is not frozen."""

    width: int = 1


class Half:
    """An unfinished kernel."""

    name = "half"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        """Return out without lse."""
        return q


class Whole(Half):
    """A kernel with all members of the protocol."""

    features: frozenset[str] = frozenset()

    def refuse(self, case: Case) -> None:
        """Take every case."""

    def backward(self, queries: Queries, k: torch.Tensor, v: torch.Tensor, how: How) -> Grads:
        """Is never called."""
        raise AssertionError


class Misspelt(Whole):
    """A kernel with a feature that there is not."""

    features = frozenset({"window"})


IDS = torch.ones(1, 16, dtype=torch.int64)
BOOLS = torch.ones(2, 2, dtype=torch.bool)
CP = ContextParallel()
TREE = PrefixTree((-1,), (16,))


def _each(name: str, call: Callable[[Any], object], values: list[Any], but: tuple[object, ...] = ()) -> list[Any]:
    """`call` with each of the values, but for those that are valid there; `name` is to be in the message."""
    return [(name, call, value) for value in values if not any(value is each for each in but)]


SCALARS = [
    *_each("Tokens(length=", lambda x: Tokens(x), NOT_WHOLE),
    *_each("SlidingWindow(left=", lambda x: SlidingWindow(x), NOT_WHOLE, (None,)),
    *_each("SlidingWindow(right=", lambda x: SlidingWindow(1, x), NOT_WHOLE, (None,)),
    *_each("PrefixLM(prefix=", lambda x: PrefixLM(x), NOT_WHOLE),
    *_each("Keys(length=", lambda x: Keys((), x), NOT_WHOLE, (None,)),
    *_each("BidirectionalSpans(left=", lambda x: BidirectionalSpans((), None, x), NOT_WHOLE, (None,)),
    *_each("BlockMask needs block >= 1", lambda x: BlockMask(x, ((True,),)), NOT_WHOLE),
    *_each("BlockMask needs block >= 1", lambda x: BlockMask.of(BOOLS, x), NOT_WHOLE),
    *_each("got nodes=", lambda x: Topology(x, 2), NOT_WHOLE),
    *_each("ranks_per_node=", lambda x: Topology(2, x), NOT_WHOLE),
    *_each("ranks_per_node=", lambda x: Topology.from_sizes(8, ranks_per_node=x), NOT_WHOLE, (None,)),
    *_each("parts=", lambda x: Strategy(parts=x), NOT_WHOLE),
    *_each("parts=", lambda x: Strategy(parts=(1, x)), NOT_WHOLE),
    *_each("ulysses_degree=", lambda x: Strategy(ulysses_degree=x), NOT_WHOLE),
    *_each("mesh_degree=", lambda x: Strategy(mesh_degree=x), NOT_WHOLE),
    *_each("ranks_per_node=", lambda x: Strategy(ranks_per_node=x), NOT_WHOLE),
    *_each("VirtualRing(seed=", lambda x: VirtualRing(Topology(1, 2), seed=x), NOT_WHOLE[:-1]),
    *_each("Scores(seed=", lambda x: Scores(seed=x), NOT_WHOLE[:-1], (None,)),
    *_each("Scores(scale=", lambda x: Scores(scale=x), [*NO_NUMBERS, 0, -1], (None,)),
    *_each("Scores(softcap=", lambda x: Scores(softcap=x), [*NO_NUMBERS, 0, -1], (None,)),
    *_each("Scores(dropout=", lambda x: Scores(dropout=x, seed=0), [*NO_NUMBERS, 1, -1]),
    *_each("Scores(alibi_slopes=", lambda x: Scores(alibi_slopes=[0.5, x]), NO_NUMBERS),
    *_each("Scores(scale=", lambda x: burst_attention(X, X, X, CP, softmax_scale=x), [*NO_NUMBERS, 0, -1], (None,)),
    *_each("Tokens(length=", lambda x: CP.positions(x), NOT_WHOLE),
    *_each("Tokens(length=", lambda x: CP.tokens(x, Causal()), NOT_WHOLE),
    *_each("Tokens(length=", lambda x: CP.imbalance(Causal(), x), NOT_WHOLE),
    *_each("not a dimension of x", lambda x: CP.shard(X, x), [*NOT_WHOLE[:-1], 9, -5]),
    *_each("not a dimension of local", lambda x: CP.unshard(X, x), [*NOT_WHOLE[:-1], 9, -5]),
    *_each("pad_token_id=", lambda x: shard_batch({"input_ids": IDS}, CP, pad_token_id=x), NOT_WHOLE),
]
SPANS = [*NO_LISTS[:3], {0, 8}, torch.tensor(8), Causal(), [0, 8], [(0, 8.5)], [(0, 8, 9)], [(0,)], [(2, 1)]]
FLAGS = [3, "10", {1, 0}, BOOLS[0], [1, 0], [[2]], [["a"]], [[None]], [[0.5]], [[NAN]]]
NO_BOOLS = [None, [[True]], BOOLS[0], BOOLS.int(), BOOLS.to("meta"), BOOLS.to_sparse()]
LISTS = [
    *_each("cu_seqlens", lambda x: Documents(x), NOT_WHOLE_LISTS),
    *_each("Documents(lengths=", lambda x: Documents((0, 8), x), NOT_WHOLE_LISTS, (None,)),
    *_each("cu_seqlens", lambda x: Documents((0, 8), None, x), NOT_WHOLE_LISTS),
    *_each("Documents(kv_lengths=", lambda x: Documents((0, 8), None, None, x), NOT_WHOLE_LISTS),
    *_each("cu_seqlens", lambda x: Tokens(8, x), NOT_WHOLE_LISTS),
    *_each("Tokens(holders=", lambda x: Tokens(8, holders=x), NOT_WHOLE_LISTS),
    *_each("Tokens(bounds=", lambda x: Tokens(8, holders=(0, 1), bounds=x), NOT_WHOLE_LISTS, (None,)),
    *_each("Keys", lambda x: Keys(x), SPANS),
    *_each("Keys", lambda x: Keys([x]), NOT_WHOLE_LISTS),
    *_each("BidirectionalSpans", lambda x: BidirectionalSpans(x), SPANS),
    *_each("BidirectionalSpans(groups=", lambda x: BidirectionalSpans(((0, 1),), x), NOT_WHOLE_LISTS[:-1], (None,)),
    *_each("BlockMask(allowed=", lambda x: BlockMask(2, x), FLAGS),
    *_each("a block mask is a bool tensor", lambda x: BlockMask.of(x, 2), NO_BOOLS),
    *_each("key padding is a bool tensor", lambda x: key_padding(x), NO_BOOLS),
    *_each("PerRow(masks=", lambda x: PerRow(x), [*NO_LISTS, (), [Causal], ["causal"], [None], [PerRow((Full(),))]]),
    *_each("Scores(alibi_slopes=", lambda x: Scores(alibi_slopes=x), NO_LISTS),
    *_each("hierarchy=", lambda x: Topology.from_sizes(8, x), [*NOT_WHOLE_LISTS, []]),
    *_each("hierarchy=", lambda x: ContextParallel(hierarchy=x), [*NOT_WHOLE_LISTS, []]),
]


@pytest.mark.parametrize(("name", "call", "value"), [*SCALARS, *LISTS], ids=lambda x: "" if callable(x) else shown(x))
def test_numbers_and_lists_of_the_wrong_kind_are_refused(
    name: str, call: Callable[[Any], object], value: object
) -> None:
    with pytest.raises(ValueError, match=re.escape(name)) as found:
        call(value)
    assert_one_line(str(found.value))


def assert_one_line(message: str) -> None:
    assert "\n" not in message
    assert 20 < len(message) < 500
    assert "object has no attribute" not in message


@pytest.mark.parametrize("convert", ["int8", "int32", "int64", "uint8"])
def test_whole_numbers_of_other_libraries_are_whole_numbers(convert: str) -> None:
    numpy = pytest.importorskip("numpy")
    for n in (getattr(numpy, convert)(2), torch.tensor(2, dtype=getattr(torch, convert))):
        made = Tokens(n), SlidingWindow(n, n), PrefixLM(n), Topology(n, n), Strategy(parts=n, ranks_per_node=n)
        expected = Strategy(parts=2, ranks_per_node=2)
        assert made == (Tokens(2), SlidingWindow(2, 2), PrefixLM(2), Topology(2, 2), expected)
        assert type(made[3].nodes) is type(made[4].parts) is type(made[4].ranks_per_node) is int
        assert Topology.from_sizes(4, [n, n], n) == Topology(2, 2)
    for starts in (numpy.array([0, 8], convert), torch.tensor([0, 8]), [0.0, 8.0], iter([0, 8]), range(0, 16, 8)):
        assert Documents(starts) == Documents((0, 8))
    for scale in (numpy.float32(0.5), numpy.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16)):
        assert Scores(scale=scale, dropout=scale, seed=0) == Scores(scale=0.5, dropout=0.5, seed=0)
    assert as_whole(numpy.bool_(True)) is as_number(numpy.bool_(True)) is None


def test_seeds_are_integers() -> None:
    assert Scores(seed=torch.tensor(7)) == Scores(seed=7)
    with pytest.raises(ValueError, match=r"Scores\(seed=1\.5\) is not valid; use an integer"):
        Scores(seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("listed", "mask"),
    [
        (PerRow([Documents((0, 5, 8)), Documents([0, 8])]), PerRow((Documents((0, 5, 8)), Documents((0, 8))))),  # type: ignore[arg-type]
        (Keys([[0, 5]]), Keys(((0, 5),))),  # type: ignore[arg-type, list-item]
        (BlockMask(4, [[True, False], [True, True]]), BlockMask(4, ((True, False), (True, True)))),  # type: ignore[arg-type]
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_may_be_made_of_lists(listed: Mask, mask: Mask) -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in Problem.draw(8, (2, 2))[:3])
    out, expected = (burst_attention(q, k, v, ContextParallel(), mask=given) for given in (listed, mask))
    assert torch.equal(out, expected)
    assert (listed, hash(listed)) == (mask, hash(mask)), "plans are kept by masks"


RING = VirtualRing(Topology(1, 2))
NESTED = torch.nested.as_nested_tensor([X[0], X[0, :8]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [1.0]}, r"q is \[1.0\], not a tensor; pass what this rank holds as a torch.Tensor"),
        ({"k": None}, "k is None, not a tensor"),
        ({"v": "v"}, "v is 'v', not a tensor"),
        ({"sink": [0.0, 0.0]}, r"sink is \[0.0, 0.0\], not a tensor"),
        ({"bias": 1.0}, "bias is 1.0, not a tensor"),
        ({"q": X.to("meta")}, "q is a tensor on the meta device, without data; make it on the device of the process"),
        ({"k": X.to_sparse()}, r"k is a tensor of layout torch.sparse_coo; use x.to_dense\(\)"),
        ({"q": NESTED}, "q is a tensor that is nested; pad its rows to one length"),
        ({"sink": torch.zeros(2, device="meta")}, "sink is on meta, but q, k, v are on cpu; move it there"),
        ({"bias": torch.zeros(1, 1, 16, 16, device="meta")}, "bias is on meta, but q, k, v are on cpu"),
        ({"sink": torch.zeros(2).long()}, "sink must be floating point .*, got torch.int64"),
        ({"bias": torch.zeros(1, 1, 16, 16).long()}, "bias must be floating point .*, got torch.int64"),
        ({"bias": torch.zeros(1, 1, 16, 16).to_sparse()}, "bias is a tensor of layout torch.sparse_coo"),
        (
            {"scores": {"scale": 1.0}},
            r"scores=\{'scale': 1.0\} is not a Scores; write Scores\(scale=..., softcap=...\)",
        ),
        ({"scores": None}, "scores=None is not a Scores"),
        ({"mask": None}, r"mask=None is not a mask; use one of the masks of burst_plugin, such as Causal\(\)"),
        (
            {"mask": PlainMask()},
            r"mask is a PlainMask, .* compared between ranks: write @dataclass\(frozen=True\) above",
        ),
        (
            {"mask": ChangeableMask()},
            r"mask is a ChangeableMask, .*: write @dataclass\(frozen=True\) above its class",
        ),
        ({"mask": "causal"}, r"mask='causal' is not a mask; use one of the masks of burst_plugin"),
        ({"mask": Causal}, r"mask is the class Causal; pass an object of it, Causal\(...\)"),
        (
            {"mask": torch.ones(16, 16)},
            r"mask is Tensor \[16, 16\] of torch.float32, not a mask; key_padding\(valid\) makes one of a bool "
            r"tensor \[batch, all keys\], BlockMask.of\(allowed, block\) of one \[query blocks, key blocks\]",
        ),
        ({"tokens": 16}, r"tokens=16 is not valid; use Tokens\(length\), or, for cross attention, a pair of them"),
        ({"tokens": (Tokens(16),)}, r"tokens=\(Tokens\(length=16\),\) is not valid"),
        ({"tokens": [Tokens(16), Tokens(16)]}, "a pair of them as a tuple"),
        ({"return_lse": 1}, "return_lse=1 is not valid; use True or False"),
        ({"return_max_logits": "no"}, "return_max_logits='no' is not valid"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_of_attention_of_the_wrong_kind_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"q": X, "k": X, "v": X, **change}
    calls: list[Callable[..., object]] = [lambda **kwargs: burst_attention(**kwargs, cp=ContextParallel())]
    if not change.keys() & {"return_lse", "return_max_logits"}:
        calls.append(RING.attention)
    for call in calls:
        with pytest.raises(ValueError, match=message) as found:
            call(**arguments)
        assert_one_line(str(found.value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: burst_attention(X, X, X, None), r"cp is None, not a ContextParallel; .* ContextParallel\(group\)"),
        (
            lambda: burst_attention(X, X, X, X),
            r"cp is Tensor \[1, 16, 2, 4\] of torch.float32, not a ContextParallel",
        ),
        (lambda: shard_batch({"input_ids": X}, None), "cp is None, not a Context"),
        (
            lambda: shard_batch({"input_ids": [[1, 2]]}, CP),
            r"needs input_ids, a tensor of shape \[batch, tokens\], got a list",
        ),
        (
            lambda: shard_batch({"input_ids": IDS, "labels": IDS[:, 1:]}, CP),
            r"labels of shape \[1, 15\] .* \[1, 16\], those of the input; give one for each token, not shifted",
        ),
        (lambda: shard_batch(shard_batch({"input_ids": IDS}, CP), CP), "the batch is cut already, by shard_batch or"),
        (
            lambda: shard_batch({"input_ids": IDS, "position_ids": torch.zeros(2, 1, 16)}, CP),
            r"position_ids of shape \[2, 1, 16\] are not one for each token: give \[1, 16\], .* mRoPE, \[3, 1, 16\]",
        ),
        (
            lambda: shard_batch({"input_ids": IDS.expand(2, -1), "position_ids": torch.zeros(1, 16)}, CP),
            r"position_ids of shape \[1, 16\] are not one for each token: give \[2, 16\], expanded to all rows",
        ),
        (
            lambda: shard_batch({"input_ids": IDS, "position_ids": torch.zeros(3, 1, 16), "tree": TREE}, CP),
            r"position_ids of shape \[3, 1, 16\], of mRoPE, are given with a tree",
        ),
        (
            lambda: ContextParallel(strategy={"parts": 1}),
            r"strategy=\{'parts': 1\} is not a Strategy; write Strategy\(",
        ),
        (lambda: ContextParallel("world"), "group is 'world', not a process group; pass the context-parallel"),
        (lambda: ContextParallel([0, 1]), r"group is \[0, 1\], not a process group"),
        (lambda: ContextParallel(kernel=TorchCpuKernel), r"kernel=TorchCpuKernel is a class; .*, TorchCpuKernel\(\)"),
        (
            lambda: ContextParallel(kernel=Half()),
            "kernel=.* lacks features, refuse, backward, which .*kernels.Kernel n",
        ),
        (
            lambda: Strategy(kernel=Misspelt()),
            r"kernel.features='window' is not valid; .* \(did you mean windows\?\)",
        ),
        (
            lambda: Strategy(schedule=Topology),
            r"schedule=Topology is a function; list it in EVERY_SCHEDULE of .*rings",
        ),
        (
            lambda: recurrent.causal_convolution(X[0], torch.ones(2, 1, 4), place=recurrent.Placement(CP)),
            r"weight of shape \[2, 1, 4\] is not valid: it has to be \[C, W\]; pass weight\[:, 0\]",
        ),
        (lambda: ContextParallel(hierarchy=1), "hierarchy=1 is not valid; give a list of sizes or of process groups"),
        (lambda: ContextParallel(hierarchy=[]), r"hierarchy=\[\] has no sizes; give them, .* such as \[1\], or None"),
        (lambda: Strategy(layout=["zigzag"]), r"layout=\['zigzag'\] is not valid; use one of: zigzag"),
        (lambda: Tokens(8, layout=["zigzag"]), r"Tokens\(layout=\['zigzag'\]\) is not valid; use one of: zigzag"),
        (lambda: VirtualRing(4), r"topology=4 is not a Topology; write Topology\(nodes=1, ranks_per_node=4\)"),
        (lambda: VirtualRing(Topology(1, 2), {}), r"strategy=\{\} is not a Strategy"),
        (lambda: SlidingWindow(left=3.5), r"SlidingWindow\(left=3.5\) is not valid; .* or None for no bound"),
        (lambda: Tokens(1.5), r"Tokens\(length=1.5\) is not valid; a sequence has 1 token or more"),
        (lambda: Topology("2", 2), "whole numbers, at least 1 node .* got nodes='2', ranks_per_node=2"),
        (lambda: Topology(1.5, 2), "got nodes=1.5"),
        (lambda: Documents([0.0, 8.5, 16.0]), "entry 1 is 8.5, not a whole number; give one list of where documents"),
        (lambda: Documents([[0, 8], [0, 8]]), r"entry 0 is \[0, 8\], .* in every batch row are PerRow\(\(Documents"),
        (lambda: Documents(torch.zeros(2, 2)), r"cu_seqlens=Tensor \[2, 2\] of torch.float32\) .* are PerRow\("),
        (lambda: Causal() & torch.ones(99), r"combine with &, got Causal\(\) & Tensor \[99\] of torch.float32"),
        (lambda: ContextParallel().shard(X, dim=9), r"dim=9 is not a dimension of x \[1, 16, 2, 4\]; .* dim=1"),
        (lambda: ContextParallel().shard([1, 2]), r"x is \[1, 2\], not a tensor"),
        (lambda: ContextParallel().shard(X, tokens=16), r"tokens=16 is not valid; use Tokens\(length\)"),
        (lambda: ContextParallel().unshard(None), "local is None, not a tensor"),
        (lambda: ContextParallel().tokens(16, "causal"), "mask='causal' is not a mask"),
        (lambda: ContextParallel().imbalance(X, 16), r"mask is Tensor \[1, 16, 2, 4\] of torch.float32, not a mask"),
    ],
)
def test_what_was_got_and_what_to_write_instead_are_said(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        make()
    assert_one_line(str(found.value))


def test_a_kind_of_call_that_is_known_says_nothing_of_the_next_ones_layout() -> None:
    """Sparse and dense tensors share shapes, types and devices, by which calls are remembered."""
    cp = ContextParallel()
    burst_attention(X, X, X, cp)
    with pytest.raises(ValueError, match=r"k is a tensor of layout torch.sparse_coo; use x.to_dense\(\)"):
        burst_attention(X, X.to_sparse(), X, cp)


def test_a_dtensor_is_refused_before_its_global_shape_is_taken_for_a_local_one() -> None:
    class Distributed(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    cp = ContextParallel()
    q, k, v = Problem.draw(8, (2, 2))[:3]
    burst_attention(q, k, v, cp)  # a call that is like the next one, but for that
    with pytest.raises(ValueError, match=r"k is a Distributed; pass k\.to_local\(\), what this rank holds"):
        burst_attention(q, k.as_subclass(Distributed), v, cp)
    with pytest.raises(ValueError, match=r"sink is a Distributed; pass sink\.to_local\(\)"):
        burst_attention(q, k, v, cp, sink=torch.zeros(2).as_subclass(Distributed))


def test_a_prefix_longer_than_the_sequence_is_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"PrefixLM\(prefix=17\) goes beyond the 16 keys"):
        burst_attention(X, X, X, cp, mask=PrefixLM(17))
    assert burst_attention(X, X, X, cp, mask=PrefixLM(16)).shape == X.shape


def _one_is_wrong(rank: int, change: dict[str, Any]) -> None:
    arguments = {"q": X, "k": X, "v": X, **(change if rank == 1 else {})}
    burst_attention(**arguments, cp=ContextParallel(dist.group.WORLD, ranks_per_node=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [1.0]}, "ValueError: rank 1: q is [1.0], not a tensor"),
        ({"softmax_scale": "0.3"}, "ValueError: rank 1: Scores(scale='0.3') is not valid; use a positive factor"),
        ({"softmax_scale": 1.0, "scores": Scores(scale=1.0)}, "ValueError: rank 1: got softmax_scale=1.0 and scores"),
        ({"scores": {}}, "ValueError: rank 1: scores={} is not a Scores"),
        ({"sink": [0.0, 0.0]}, "ValueError: rank 1: sink is [0.0, 0.0], not a tensor"),
        ({"mask": PrefixLM(33)}, "ValueError: rank 1: PrefixLM(prefix=33) goes beyond the 32 keys"),
    ],
    ids=str,
)
def test_one_ranks_wrong_argument_is_an_error_on_every_rank(change: dict[str, Any], message: str) -> None:
    for line in last_lines(_one_is_wrong, 2, change, timeout_s=20.0):
        assert message in line


def _unshards_wrongly(rank: int) -> None:
    ContextParallel(dist.group.WORLD, ranks_per_node=2).unshard(X, dim=9 if rank else 1)


def test_one_ranks_wrong_dimension_is_an_error_on_every_rank() -> None:
    for line in last_lines(_unshards_wrongly, 2, timeout_s=20.0):
        assert "ValueError: rank 1: dim=9 is not a dimension of local [1, 16, 2, 4]" in line


def _left_out(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(ValueError, match="is not in the group it was given") as found:
        ContextParallel(group)
    return str(found.value)


def test_what_a_rank_that_a_group_leaves_out_is_given_is_no_size() -> None:
    assert "(global rank 1)" in run_ranks(_left_out, 2)[1]


def test_dropout_needs_a_seed() -> None:
    """Else every layer and step would leave out the same probabilities."""
    with pytest.raises(ValueError, match=r"Scores\(dropout=0.5\) has no seed, .*give another one to each"):
        Scores(dropout=0.5)
    with pytest.raises(ValueError, match=r"Scores\(dropout=0.5\) has no seed"):
        replace(Scores(scale=0.5), dropout=0.5)
    with pytest.raises(ValueError, match=r"Scores\(dropout=0.5\) has no seed"):
        Scores(dropout=0.5, seed=None)
    assert Scores(dropout=0.5, seed=0).seed == 0
    assert replace(Scores(seed=3), dropout=0.5).seed == 3
    assert str(inspect.signature(Scores).parameters["seed"]) == "seed: 'int | None' = None"
