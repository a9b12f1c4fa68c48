"""Checks of single arguments: the whole numbers, numbers and lists that constructors take.

Numbers may come from Python, numpy or PyTorch. A message reads "{argument} is not valid; {expected}", in which
`pattern`, such as "Tokens(length={})", names the argument with {} for its value, and `expected` says what to write
instead. Pure Python, without torch, as `burst_plugin.topology` is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Set
from difflib import get_close_matches
from typing import Any, SupportsFloat

SUMMARY = " ... ["
"""Begins the digest of what a text leaves out; ranks that compare such texts then look for the place that differs."""
_MOST = 80  # characters of a value in a message


def shown(value: object) -> str:
    """Return `value` for a message, on one line: arrays by shape and type, classes by name, long texts cut."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if getattr(value, "is_nested", False):
        return f"nested {kind}"
    if getattr(value, "shape", ()):  # a number in a tensor of no dimension shows as itself
        return f"{kind} {list(value.shape)} of {getattr(value, 'dtype', 'no type')}"  # type: ignore[attr-defined]
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."


def unreadable(tensor: Any) -> str:
    """Return why a tensor's values cannot be read one by one, and what to do; "" if they can.

    The text follows the words "a tensor": "of layout torch.sparse_coo; use x.to_dense()". It is for nested tensors,
    tensors on the meta device, and layouts that are not strided.
    """
    if tensor.is_nested:
        return "that is nested; pad its rows to one length, x.to_padded_tensor(0.0)"
    if tensor.is_meta:
        return "on the meta device, without data; make it on the device of the process group"
    return "" if str(tensor.layout) == "torch.strided" else f"of layout {tensor.layout}; use x.to_dense()"


def as_whole(value: object) -> int | None:
    """Return an integer of Python, numpy or PyTorch as an int; None for anything else, floats and bools too."""
    if _is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # by numbers, arrays, and tensors without data
        return None


def as_number(value: object) -> float | None:
    """Return a finite number of Python, numpy or PyTorch as a float; None for anything else, texts and bools too."""
    if _is_bool(value) or not isinstance(value, SupportsFloat):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def whole_number(pattern: str, value: object, expected: str, least: int | None = 0) -> int:
    """Return `value` as an int. Raise ValueError for anything else, and for numbers below `least`.

    pattern: names the argument in the error, with {} for its value: "Tokens(length={})".
    expected: what to write instead, after "is not valid; ".
    least: the smallest number allowed; None for no bound.
    """
    result = as_whole(value)
    if result is None or (least is not None and result < least):
        raise ValueError(f"{pattern.format(shown(value))} is not valid; {expected}")
    return result


def number(pattern: str, value: object, expected: str) -> float:
    """Return `value` as a finite float. Raise ValueError for anything else.

    pattern: names the argument in the error, with {} for its value: "Scores(scale={})".
    expected: what to write instead, after "is not valid; ".
    """
    result = as_number(value)
    if result is None:
        raise ValueError(f"{pattern.format(shown(value))} is not valid; {expected}")
    return result


def whole_numbers(pattern: str, values: object, expected: str) -> tuple[int, ...]:
    """Return the whole numbers of a list, an array or a tensor of one dimension as a tuple; floats may be whole, too.

    pattern: names the argument in the error, with {} for its value: "hierarchy={}".
    expected: what to write instead, after "is not valid; ".

    Raises ValueError for anything else; the message names a wrong entry.
    """
    listed = as_listed(pattern, values, expected)
    if all(type(value) is int for value in listed):  # the usual case, and there may be many
        return listed  # type: ignore[return-value]
    numbers = [as_whole(int(x) if isinstance(x, float) and x.is_integer() else x) for x in listed]
    if None in numbers:
        at = numbers.index(None)
        raise ValueError(
            f"{pattern.format('...')} is not valid: entry {at} is {shown(listed[at])}, not a whole number; {expected}"
        )
    return tuple(numbers)  # type: ignore[arg-type]


def as_listed(pattern: str, values: object, expected: str) -> tuple[object, ...]:
    """Return the entries of a list, an array, a tensor of one dimension, or another ordered iterable, as a tuple.

    pattern: names the argument in the error, with {} for its value: "PerRow(masks={})".
    expected: what to write instead, after "is not valid; ".

    Raises ValueError for texts, sets, mappings, and anything else without an order or of several dimensions.
    """
    unordered = (str, bytes, Mapping, Set)
    if isinstance(values, unordered) or not isinstance(values, Iterable) or len(getattr(values, "shape", (1,))) != 1:
        raise ValueError(f"{pattern.format(shown(values))} is not valid; {expected}")
    tolist = getattr(values, "tolist", None)
    return tuple(values) if tolist is None else tuple(tolist())


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def as_positive(value: object) -> int | None:
    """Return a positive whole number of any type as an int; None for anything else."""
    return whole if (whole := as_whole(value)) is not None and whole >= 1 else None


def check_one_of(option: str, value: object, valid: Collection[str]) -> None:
    """Raise ValueError, which lists the `valid` names and the nearest, unless `value` of `option` is one of them."""
    if not isinstance(value, str) or value not in valid:
        nearest = did_you_mean(value, valid) if isinstance(value, str) else ""
        raise ValueError(f"{option}={shown(value)} is not valid; use one of: {', '.join(valid)}{nearest}")


def did_you_mean(word: str, valid: Collection[str], likeness: float = 0.6, quote: str = "") -> str:
    """Return text for a message, " (did you mean zigzag?)", with the name in `valid` that is most like `word`.

    likeness: how alike they have to be, from 0 to 1, in small letters; if no name is, the text is empty.
    quote: stands around the name.
    """
    names = {name.lower(): name for name in valid}
    close = get_close_matches(word.lower(), names, 1, likeness)
    return f" (did you mean {quote}{names[close[0]]}{quote}?)" if close else ""
