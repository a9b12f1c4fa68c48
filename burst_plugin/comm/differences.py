"""Where values that ranks compare differ, if they are too long for one exchange.

Ranks that differ exchange digests of smaller and smaller pieces:

    mask                        differs; of its parts, which are fields,
    mask: Documents.cu_seqlens  does; of its entries those from 806 on,
        entry 812               which is 40960 on some ranks and 40992 on others

All decisions follow from texts that all ranks have exchanged, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from burst_plugin.checks import SUMMARY
from burst_plugin.comm.call_identity import by_rank

Exchange = Callable[[str], Sequence[str]]  # collective: returns the texts of all ranks, in rank order

_SHORT = 160  # characters of a value that are shown, and of a piece of a text
_DIGESTS = 96  # that fit into an exchange


class TensorValues(Sequence[float]):
    """A sequence of the numbers of a tensor [N], read only at first use: on GPUs that waits for all queued work."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @cached_property
    def _numbers(self) -> tuple[float, ...]:
        return tuple(self._tensor.tolist())

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]

    def __repr__(self) -> str:
        return f"{self._tensor.dtype} {self._numbers}"


def differences(compared: Mapping[str, object], exchange: Exchange) -> str:
    """Return in words where values differ between ranks, and what each rank has there; collective.

    Args:
        compared: this rank's values, by name.
        exchange: collective; sends a text to all ranks, and returns the texts of all, in rank order.

    Returns:
        One clause for each value that differs, joined by "; ". "" if ranks have other names than these.
    """
    ours = [f"{name} {_digest(str(value))}" for name, value in compared.items()]
    received = [text.splitlines() for text in exchange("\n".join(ours))]
    if any([line.rpartition(" ")[0] for line in lines] != [*compared] for lines in received):
        return ""
    unlike = [name for name, *lines in zip(compared, *received, strict=True) if len(set(lines)) > 1]
    return "; ".join(_where(name, compared[name], exchange) for name in unlike)


def _where(path: str, value: object, exchange: Exchange) -> str:
    """Return the first difference of a value between ranks, in words, with each rank's part there. Collective."""
    at = ""
    while True:
        parts, label = _opened(value)
        received = [text.split("\n", 3) for text in exchange("\n".join(_described(value, len(parts))))]
        kinds, cut, lengths, texts = zip(*received, strict=True)
        place = None
        if len(set(kinds)) == 1 and "cut" in cut:
            place = _first_unlike(parts, max(map(int, lengths)), exchange)
        if place is None:
            return f"{path} differs{at}: {by_rank(dict(enumerate(texts)), len(texts))}"
        if is_dataclass(value):
            path, at = path + at + label(place), ""
        else:
            path, at = path + at, label(place)
        value = parts[place] if place < len(parts) else _End(f"nothing, there are {len(parts)}")


def _first_unlike(parts: Sequence[object], length: int, exchange: Exchange) -> int | None:
    """Return the number of the first of `length` parts that differs between ranks; None if none does. Collective."""
    start, stop = 0, length
    while True:
        step = max(1, -(-(stop - start) // _DIGESTS))
        starts = range(start, stop, step)
        ours = [_digest(repr(parts[at : at + step])) for at in starts]
        digests_of_ranks = [text.split() for text in exchange(" ".join(ours))]
        differ = [len(set(digests)) > 1 for digests in zip(*digests_of_ranks, strict=True)]
        if True not in differ:
            return None
        first = starts[differ.index(True)]
        if step == 1:
            return first
        start, stop = first, min(first + step, stop)


class _End(str):
    """A value in the place of an entry that other ranks have and this one lacks."""

    __slots__ = ()


def _opened(value: object) -> tuple[Sequence[object], Callable[[int], str]]:
    """Return the parts of a value, fields, entries or pieces of its text, and a function that names a part."""
    if is_dataclass(value):
        names, kind = [field.name for field in fields(value) if field.repr], type(value).__name__
        return [getattr(value, name) for name in names], lambda place: f": {kind}.{names[place]}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value, lambda place: f" at entry {place}"
    text = str(value)
    pieces = [text[at : at + _SHORT] for at in range(0, len(text), _SHORT)]
    return pieces, lambda place: f" at character {place * _SHORT}"


def _described(value: object, length: int) -> tuple[str, str, str, str]:
    """Return a value as ranks send it: its type, whether its text is cut, the number of its parts, and the text."""
    text = str(value)
    shown = text if len(text) <= _SHORT else f"{text[:_SHORT]} ..."
    return type(value).__name__, "whole" if shown == text and SUMMARY not in text else "cut", str(length), shown


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


CHECKSUMS = 2**31 - 1  # a checksum is below this
VALUES_AT_ONCE = 2**22  # values that are added up: pixels may be many more


def checksum_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that two different batches are unlikely to share; the order of tensors counts."""
    checksum = 0
    for x in tensors:
        flat = x.detach().flatten()
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for start in range(0, flat.numel(), VALUES_AT_ONCE):
            part = flat[start : start + VALUES_AT_ONCE]
            part = part.float().view(torch.int32) if x.is_floating_point() else part
            weights = torch.arange(start + 1, start + len(part) + 1, device=x.device) % 65521 + 1
            total += (part.to(torch.int64) * weights).sum()
        checksum = (31 * checksum + int(total % CHECKSUMS)) % CHECKSUMS
    return checksum
