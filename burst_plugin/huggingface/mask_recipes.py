"""The mask function that goes with `attn_implementation="burst"`.

transformers makes a mask [B, 1, S, S] before the layers run. A ring does not need it: masks are known by their rules,
and positions of a shard, which are not consecutive, look like packed samples to transformers. So layers get the
recipe of a mask, which becomes a tensor only where a rank has whole sequences.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from burst_plugin.batch import SHARD_KEY, SequenceShard
from burst_plugin.huggingface.image_groups import GroupRule, MarkedTurn, group_mask, group_rule, groups_agree
from burst_plugin.sequence.mask import Both
from burst_plugin.sequence.masks import Causal, Documents, Full, Mask, PerRow, SlidingWindow

if TYPE_CHECKING:
    from burst_plugin.huggingface.ring_cache import RingCache

ATTN_IMPLEMENTATION = "burst"  # without flash, sdpa, flex or eager in it, which transformers looks for
NO_CACHE = (
    "{} selects pools of the keys of all tokens, and a RingCache has index keys of single tokens alone; "
    "generate with a cache of transformers, on one rank"
)

_CAUSAL = "causal_mask_function"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_WINDOW_BOTH_WAYS = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
# transformers makes _DOCUMENTS of positions, always together with _IN_DOCUMENTS; models make it of ids of their own.
_DOCUMENTS = "packed_sequence_mask_function.<locals>.inner_mask"
_IN_DOCUMENTS = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_EITHER = "or_masks.<locals>.or_mask"
_IN_BLOCKS = "blockwise_overlay.<locals>.inner_mask"
_OF_ALL_HEADS = [str(index) for index in ((slice(None), 0), (slice(None), 0, slice(None), slice(None)))]
_KNOWN = frozenset(
    {
        _CAUSAL,
        "bidirectional_mask_function",
        _WINDOW,
        _WINDOW_BOTH_WAYS,
        _CHUNKS,
        _DOCUMENTS,
        _IN_DOCUMENTS,
        "packed_sequence_compatibility_function.<locals>.inner_mask",
        "and_masks.<locals>.and_mask",
    }
)


class Forward(NamedTuple):
    """The forward pass of a model that is in progress, and the batch that it runs on.

    model: the model of transformers, or a layer that was called by itself.
    shard: the shard that its batch is; None for a whole batch, or with a cache.
    positions: the `position_ids` of this rank's tokens, as the model got them; None if it got none.
    cache: the `RingCache` that it runs with; None for none.
    """

    model: torch.nn.Module
    shard: SequenceShard | None
    positions: Tensor | None
    cache: RingCache | None


_FORWARDS: ContextVar[tuple[Forward, ...]] = ContextVar("burst_plugin_forwards", default=())  # innermost last
_REPORTED: set[str] = set()  # names of models that were reported, for their documents
_LOG = logging.getLogger(__name__)


def enter_forward(
    model: torch.nn.Module,
    shard: SequenceShard | None,
    positions: Tensor | None,
    cache: RingCache | None = None,
) -> None:
    """Note that a model's forward begins, on `shard`, with these `positions` of this rank's tokens, or with `cache`.

    Without a shard, a module inside the model whose forward is in progress takes over that model's shard, positions
    and cache. `leave_forward` ends it.

    An earlier forward of the same model that is still noted was interrupted, as by Ctrl-C, for which PyTorch runs no
    hooks. It is forgotten, with all that it had begun.
    """
    outer = _FORWARDS.get()
    outer = outer[: next((at for at, each in enumerate(outer) if each.model is model), None)]
    if shard is None and outer and any(part is model for part in outer[-1].model.modules()):
        shard, positions, cache = outer[-1][1:]
    _FORWARDS.set((*outer, Forward(model, shard, positions, cache)))


def forward_in_progress() -> Forward | None:
    """Return the model forward in progress: the innermost one if models are nested, None if there is none."""
    forwards = _FORWARDS.get()
    return forwards[-1] if forwards else None


def shard_of_forward() -> SequenceShard | None:
    """Return the shard that the forward in progress runs on; None for a whole batch, or without a forward."""
    forward = forward_in_progress()
    return None if forward is None else forward.shard


def cache_of_forward() -> RingCache | None:
    """Return the `RingCache` that the forward in progress runs with; None for none."""
    forward = forward_in_progress()
    return None if forward is None else forward.cache


def given_positions() -> Tensor | None:
    """Return the `position_ids` of this rank's tokens in the forward in progress; None for a whole batch."""
    forwards = _FORWARDS.get()
    if not forwards or forwards[-1].shard is None or forwards[-1].shard.as_given:
        return None
    return forwards[-1].positions


def leave_forward(model: torch.nn.Module) -> None:
    """Note that the forward of `model` has ended, with or without an error; do nothing if it had not begun."""
    forwards = _FORWARDS.get()
    if forwards and forwards[-1].model is model:
        _FORWARDS.set(forwards[:-1])


@contextmanager
def as_in_forward(forward: Forward) -> Iterator[None]:
    """Make `forward` the forward in progress in this context, as while a checkpoint computes its layers again."""
    before = _FORWARDS.set((*_FORWARDS.get(), forward))
    try:
        yield
    finally:
        _FORWARDS.reset(before)


class MaskRecipe:
    """A description of an attention mask in place of a tensor: the arguments of transformers' request for the mask.

    Its `ndim` of 4 tells transformers that the mask is complete.

    shard: the shard of the forward that made the recipe; None for a whole batch. Layers that hand no keyword
        arguments to their attention hand on the mask, also in recomputation, so that attention finds the shard here.
    rule: how the model of that forward groups tokens that attend to each other both ways; None for no groups.
    turn: the types of new tokens, in a forward with a cache.
    asked: the arguments of `transformers.masking_utils.sdpa_mask`.
    """

    ndim = 4
    __iter__ = None  # otherwise `__getitem__` would make it iterable

    def __init__(
        self,
        *,
        shard: SequenceShard | None = None,
        rule: GroupRule | None = None,
        turn: MarkedTurn | None = None,
        **asked: Any,
    ) -> None:
        self.shard = shard
        self._group_rule = rule
        self._turn = turn
        self._marked = turn or shard
        self._asked = asked
        self._batch_is_known = not torch.compiler.is_compiling()
        self._made: dict[bool, Tensor | None] = {}

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, with the reason, for a model that takes its mask for a tensor."""
        raise AttributeError(
            f"a model reads {name} of its attention mask, as if that were a tensor; with "
            'attn_implementation="burst" the mask is a description without values: use a model that only hands its '
            "mask to its attention function"
        )

    @property
    def shape(self) -> torch.Size:
        """Return the shape that the mask would have as a tensor, [B, 1, S_q, S_k], which some models read."""
        return torch.Size((self._asked["batch_size"], 1, self._asked["q_length"], self._asked["kv_length"]))

    def __getitem__(self, index: Any) -> MaskRecipe | Tensor:
        """Return a part of the mask [B, 1, S_q, S_k], which some models ask for; all of it is the recipe itself.

        The recipe also stands for [:, 0], which indexers ask for, unless this rank has whole rows: all heads share a
        mask.
        """
        every = (slice(None), slice(0, None))
        if isinstance(index, tuple) and all(isinstance(part, slice) and part in every for part in index):
            return self
        may_be_cut = self.shard is not None or not self._batch_is_known or cache_of_forward() is not None
        if may_be_cut and str(index) in _OF_ALL_HEADS:
            return self
        whole = self.tensor(always=True)
        assert whole is not None, "always"
        return whole[index]

    def to(self, *args: Any) -> MaskRecipe:
        """Return the recipe itself, for models such as MPT that cast their mask: it has no type and no device."""
        return self

    def within(self, window: int) -> MaskRecipe:
        """Return this mask's recipe restricted to a sliding window of `window` keys, the query's own included."""
        from transformers.masking_utils import and_masks, sliding_window_overlay

        within = and_masks(self._asked["mask_function"], sliding_window_overlay(window))
        asked = {**self._asked, "mask_function": within, "local_size": window}
        return MaskRecipe(shard=self.shard, rule=self._group_rule, turn=self._turn, **asked)

    def tensor(self, *, always: bool) -> Tensor | None:
        """Return the mask as a bool tensor [B, 1, S_q, S_k], True where a query may attend to a key.

        always: whether to make it in any case. If not, None may be returned for a mask that is plainly causal or
            full.
        """
        if always not in self._made:
            from transformers.masking_utils import sdpa_mask

            skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False} if always else {}
            self._made[always] = sdpa_mask(**{**self._asked, **skip})
        return self._made[always]

    @cached_property
    def _parts(self) -> list[tuple[str, list[Any]]]:
        return list(_parts(self._asked["mask_function"], has_empty=self._may_have_groups))

    @cached_property
    def _rules(self) -> Counter[str]:
        return Counter(name for name, _ in self._parts)

    @cached_property
    def unknown(self) -> list[str]:
        """Return transformers' names of the mask functions in this mask that a ring does not support."""
        unsized = self._rules.keys() & {_WINDOW, _WINDOW_BOTH_WAYS} if self.window is None else set()
        unsized |= self._rules.keys() & {_CHUNKS} if self.chunk is None else set()
        from transformers import masking_utils

        remaps = hasattr(masking_utils, "remap_positions_for_packed_sequence")  # not in earlier releases
        documents = {_DOCUMENTS} if self._rules[_DOCUMENTS] > (self._rules[_IN_DOCUMENTS] if remaps else 1) else set()
        known = _KNOWN if self._groups is None else _KNOWN | {_EITHER, _IN_BLOCKS}
        misread = {_IN_BLOCKS} if self._groups is None and self._has_groups else set()
        return sorted((self._rules.keys() - known) | unsized | documents | misread)

    @cached_property
    def _groups(self) -> _Groups | None:
        """Return the groups of tokens that attend to each other both ways; None if there are none that a ring knows.

        A rank may have no token of any group where another rank has some.
        """
        groups, rule, shard = list(_groups(self._asked["mask_function"])), self._group_rule, self._marked
        if not self._has_groups or len(groups) != 1:
            return None
        assert rule is not None
        assert shard is not None
        alone = not self._rules.keys() & {_WINDOW_BOTH_WAYS, _CHUNKS} and self._rules[_EITHER] <= 1
        return groups[0] if alone and groups[0].is_causal and groups_agree(shard, rule, groups[0].blocks) else None

    @cached_property
    def _has_groups(self) -> bool:
        """Return whether the model groups tokens, and the batch has marks; other ranks may have all marked tokens."""
        shard, rule = self._marked, self._group_rule
        is_marked = shard is not None and rule is not None and rule.name in shard.token_types
        return is_marked and any(True for _ in _groups(self._asked["mask_function"]))

    @property
    def _may_have_groups(self) -> bool:
        """Return whether the batch marks tokens, and it is not known which of them the model groups.

        A rule without any token on this rank may have some on another one, and all ranks have to refuse it then.
        """
        rule, types = self._group_rule, {} if self._marked is None else self._marked.token_types
        is_known = rule is not None and rule.name in types
        return not is_known and any(kind for rows in types.values() for runs in rows for _, _, kind in runs)

    @property
    def keeps_documents_apart(self) -> bool:
        """Return whether the model's own mask keeps documents apart, by `position_ids` that begin anew."""
        return _DOCUMENTS in self._rules

    @property
    def window(self) -> int | None:
        """Return the size of the mask's sliding window, in keys; None without a window.

        The query itself is included. In a window to both sides the number is of keys on either side.
        """
        if not self._rules.keys() & {_WINDOW, _WINDOW_BOTH_WAYS}:
            return None
        size: int | None = self._asked.get("local_size")
        if size is None and self._rules[_WINDOW] == 1:  # a window that a model has put around its own rule
            (size,) = next(enclosed for name, enclosed in self._parts if name == _WINDOW)
        return size

    @property
    def chunk(self) -> int | None:
        """Return the size of chunks in tokens if tokens attend only within their chunk, as in Llama 4; else None."""
        return self._asked.get("local_size") if _CHUNKS in self._rules else None

    @property
    def mask(self) -> Mask:
        """Return the layer's mask as a `Mask`, without padding, documents and chunks, which are added elsewhere."""
        causal, window, groups = _CAUSAL in self._rules, self.window, self._groups
        if groups is not None:
            assert self._marked is not None
            assert self._group_rule is not None
            left = None if window is None or not groups.is_windowed else window - 1
            spans = group_mask(self._marked, self._group_rule, left)
            if spans is not None:
                return spans if window is None or left is not None else spans & SlidingWindow(window - 1, None)
        if window is None:
            return Causal() if causal else Full()
        if _WINDOW_BOTH_WAYS in self._rules:
            return SlidingWindow(window, 0 if causal else window)
        return SlidingWindow(window - 1, 0 if causal else None)


def mask_recipe(**asked: Any) -> Any:
    """Return a `MaskRecipe`, given the arguments of `transformers.masking_utils.sdpa_mask`.

    This is the mask function of `attn_implementation="burst"`. A recipe that is given as `attention_mask` is returned
    as it is.
    """
    if isinstance(asked.get("attention_mask"), MaskRecipe):
        return asked["attention_mask"]  # generation has prepared it before
    if torch.compiler.is_compiling():  # which stops at a batch in a global variable
        return MaskRecipe(**asked)
    rules = (group_rule(forward.model) for forward in reversed(_FORWARDS.get()))
    rule = next((rule for rule in rules if rule is not None), None)
    cache = cache_of_forward()
    recipe = MaskRecipe(shard=shard_of_forward(), rule=rule, turn=None if cache is None else cache.marked, **asked)
    _tell_of_documents(recipe)
    return recipe


def _tell_of_documents(recipe: MaskRecipe) -> None:
    """Log once per model that its documents stay apart here, if its own mask would let them meet.

    transformers finds documents in positions, which some models do not hand to their mask. Positions of a shard look
    like documents wherever they are not consecutive.
    """
    if recipe.shard is None or recipe.shard.cp.rank or recipe.keeps_documents_apart:
        return
    model, positions = type(_FORWARDS.get()[-1].model).__name__, _FORWARDS.get()[-1].positions
    if model in _REPORTED or positions is None or not has_documents(recipe.shard.mask):
        return
    in_text = positions[0] if positions.dim() == 3 else positions  # of mRoPE's the first, as transformers has them
    if bool((in_text.diff(dim=-1) != 1).any()):
        _REPORTED.add(model)
        _LOG.warning(
            "%s passes no position_ids to its mask: eager and sdpa attention of transformers let the documents of a "
            "packed batch attend to each other. Here they do not, so losses differ from theirs",
            model,
        )


def has_documents(mask: Mask | None) -> bool:
    """Return whether the mask of a batch, as `SequenceShard.mask` has it, keeps documents apart; False for None."""
    if isinstance(mask, Both):
        return has_documents(mask.one) or has_documents(mask.other)
    if isinstance(mask, PerRow):
        return any(map(has_documents, mask.masks))
    return isinstance(mask, Documents)


def _parts(rule: Callable[..., Any], has_empty: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names of all functions and other callables in a rule, with the values that each encloses.

    Alternatives that let no token attend to any are left out, unless `has_empty`.
    """
    name, enclosed, rules = _opened(rule)
    if name == _EITHER and not has_empty:
        rules = [part for part in rules if not _is_empty(part)]
    if name != _EITHER or len(rules) != 1:
        yield name, enclosed
    for part in rules:
        yield from _parts(part, has_empty)


def _opened(rule: Callable[..., Any]) -> tuple[str, list[Any], list[Callable[..., Any]]]:
    """Return the name of a rule, the values that its closure holds, and the rules among these values."""
    own_name = getattr(rule, "__qualname__", type(rule).__qualname__)
    name = _names_by_code().get(getattr(rule, "__code__", None), own_name)
    inner = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    enclosed = [part for each in inner for part in (each if isinstance(each, tuple | list) else (each,))]
    return name, enclosed, [part for part in enclosed if callable(part) and not isinstance(part, torch.nn.Module)]


class _Groups(NamedTuple):
    """Groups of tokens that attend to each other besides what another rule allows.

    blocks: the number of the group of each token [B, S_local], -1 for none.
    is_causal, is_windowed: what the other rule is made of.
    """

    blocks: Tensor
    is_causal: bool
    is_windowed: bool


def _groups(rule: Callable[..., Any]) -> Iterator[_Groups]:
    """Yield all groups of tokens in a rule."""
    name, _, rules = _opened(rule)
    for part in rules:
        if name == _EITHER and _opened(part)[0] == _IN_BLOCKS:
            others = {each for other in rules if other is not part for each, _ in _parts(other)}
            yield _Groups(_opened(part)[1][0], _CAUSAL in others, _WINDOW in others)
        yield from _groups(part)


def _is_empty(rule: Callable[..., Any]) -> bool:
    """Return whether a rule lets no token attend to any, as the rule of images does in a batch without images."""
    if _names_by_code().get(getattr(rule, "__code__", None)) != _IN_BLOCKS:
        return False
    (blocks,) = (cell.cell_contents for cell in rule.__closure__ or ())
    return bool((blocks < 0).all())


@cache
def _names_by_code() -> dict[CodeType | None, str]:
    """Return the names of the rules that functions of transformers make, by their code.

    In Python 3.10 a rule that PyTorch's compiler has made again does not name the function that makes it.
    """
    from transformers import masking_utils

    makers = [maker for maker in vars(masking_utils).values() if isinstance(maker, FunctionType)]
    return {
        code: f"{maker.__qualname__}.<locals>.{code.co_name}"
        for maker in makers
        for code in maker.__code__.co_consts
        if isinstance(code, CodeType)
    }


def shard_among(values: Iterable[Any], options: Mapping[str, Any]) -> SequenceShard | None:
    """Return the shard that a layer was called with; None for a whole batch.

    It is the keyword argument `burst`, or comes with a `MaskRecipe` among the arguments.

    values, options: the positional and keyword arguments of the call.
    """
    shard: SequenceShard | None = options.get(SHARD_KEY)
    if shard is not None:
        return shard
    recipes = (each for each in (*values, *options.values()) if isinstance(each, MaskRecipe))
    return next((recipe.shard for recipe in recipes if recipe.shard is not None), None)
