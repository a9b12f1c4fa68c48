"""Kernels of layers with a state give what their definitions give: outputs, last states, and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from burst_plugin.recurrent.kernels import linear_unit as recurrence
from burst_plugin.recurrent.kernels.convolution import causal_convolution
from burst_plugin.recurrent.kernels.decay import decay_attention
from burst_plugin.recurrent.kernels.delta_rule import delta_chunks, delta_rule
from burst_plugin.recurrent.kernels.linear_unit import linear_unit
from burst_plugin.recurrent.kernels.mlstm import mlstm
from burst_plugin.recurrent.kernels.rwkv import rwkv
from burst_plugin.recurrent.kernels.selective_scan import selective_scan, selective_scan_read
from burst_plugin.recurrent.kernels.state_space import state_space, state_space_read
from tests.support.recurrences import DEFINITIONS, draw, draw_state

KERNELS: dict[str, Callable[..., Any]] = {
    "delta_rule": delta_rule,
    "delta_rule_by_channel": delta_rule,
    "state_space": state_space,
    "selective_scan": selective_scan,
    "decay_attention": decay_attention,
    "linear_unit": linear_unit,
    "rwkv": rwkv,
    "mlstm": mlstm,
}
WITH_LENGTHS = ("decay_attention", "rwkv")
PADDING = {"igate": -torch.inf, "fgate": torch.inf}  # 0 elsewhere
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-6}
FLOOR = 1e-3  # norms below are as good as 0: gradients of what has no effect, states that are below float32
BATCH = 2


def _generator(*seeds: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(letter) for letter in repr(seeds)))


def _flat(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [tensor for part in results for tensor in _flat(part)]


def _as_given(state: list[Tensor]) -> Any:
    return None if not state else state[0] if len(state) == 1 else tuple(state)


def _with_gradients(
    function: Callable[..., Any], tensors: dict[str, Tensor], state: Any, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return outputs, last states, and gradients of a sum of all of them, randomly weighted."""
    given = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    entering = [x.to(dtype).requires_grad_() for x in _flat(state)] if state is not None else []
    results = _flat(function(**given, initial_state=_as_given(entering)) if entering else function(**given))
    generator = _generator("weights")
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    total = sum((x * weight.to(x.dtype)).sum() for x, weight in zip(results, weights, strict=True))
    inputs = [*given.values(), *entering]
    return [
        x.detach() for x in (*results, *torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
    ]


def _assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == y.shape
        difference, allowed = (x.double() - y.double()).norm(), tolerance * (y.double().norm() + FLOOR)
        assert difference <= allowed, (number, float(difference), float(allowed))


@pytest.mark.parametrize("with_state", [False, True], ids=["from_nothing", "with_state"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_give_what_their_definitions_give(kind: str, length: int, with_state: bool) -> None:
    generator = _generator(kind, length)
    tensors = draw(kind, generator, BATCH, length)
    state = draw_state(kind, generator, BATCH) if with_state else None
    expected = _with_gradients(DEFINITIONS[kind], tensors, state)
    for dtype, tolerance in TOLERANCES.items():
        found = _with_gradients(KERNELS[kind], tensors, state, dtype)
        assert all(x.dtype == dtype for x in found)
        _assert_close(found, expected, tolerance)


def test_keys_of_rwkv_may_be_of_any_size() -> None:
    """Powers of keys that differ by hundreds are no float32 numbers: the largest is taken out of them."""
    tensors = draw("rwkv", _generator("large"), BATCH, 150)
    tensors |= {"k": 100 * tensors["k"], "log_decay": 20 * tensors["log_decay"]}
    state = draw_state("rwkv", _generator(), BATCH)
    expected = _with_gradients(DEFINITIONS["rwkv"], tensors, state)
    found = _with_gradients(rwkv, tensors, state, torch.float32)
    # The last top is rounded to float32, and num and den are what belongs to it. The first top's gradient, which is
    # the last here, is a difference of which nothing but rounding is left.
    _assert_close(found[:-1], expected[:-1], 5e-5)


@pytest.mark.parametrize("kind", ["selective_scan", "linear_unit", "rwkv", "state_space"])
def test_states_of_many_numbers_are_computed_token_by_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[object] = []
    in_rows = recurrence._in_rows
    monkeypatch.setattr(recurrence, "_in_rows", lambda *arguments: rows.append(1) or in_rows(*arguments))
    tensors, state = draw(kind, _generator(kind), BATCH, 65), draw_state(kind, _generator(), BATCH)
    _with_gradients(linear_unit, draw("linear_unit", _generator(), BATCH, 65), None)
    assert rows
    rows.clear()
    monkeypatch.setattr(recurrence, "_LARGE_TOKENS", 0)
    expected = _with_gradients(DEFINITIONS[kind], tensors, state)
    _assert_close(_with_gradients(KERNELS[kind], tensors, state), expected, 1e-11)
    assert not rows


@pytest.mark.parametrize(("kind", "sizes"), [("delta_rule", {"groups": 4}), ("delta_rule_by_channel", {"keys": 1})])
def test_delta_rules_of_other_shapes(kind: str, sizes: dict[str, int]) -> None:
    tensors = draw(kind, _generator(kind), BATCH, 40, **sizes)
    state = draw_state(kind, _generator(), BATCH, **sizes)
    expected = _with_gradients(DEFINITIONS[kind], tensors, state)
    for size in (1, 4, 16, 64):
        found = _with_gradients(lambda size=size, **x: delta_rule(**x, chunk_size=size), tensors, state)
        _assert_close(found, expected, 1e-11)


@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind not in WITH_LENGTHS])
def test_padding_at_the_end_changes_no_state(kind: str) -> None:
    tensors, state = draw(kind, _generator(kind), BATCH, 37), draw_state(kind, _generator(), BATCH)

    def padded(**given: Any) -> Any:
        entering = given.pop("initial_state")
        longer = {
            name: F.pad(x, [0, 0] * (x.dim() - 2) + [0, 60], value=PADDING.get(name, 0.0))
            if x.shape[:2] == (BATCH, 37)
            else x
            for name, x in given.items()
        }
        out, final = KERNELS[kind](**longer, initial_state=entering)
        return out[:, :37], final

    expected = _with_gradients(KERNELS[kind], tensors, state)
    _assert_close(_with_gradients(padded, tensors, state), expected, 1e-13)


@pytest.mark.parametrize("kind", WITH_LENGTHS)
def test_what_is_behind_pieces_lengths_changes_no_state(kind: str) -> None:
    lengths = [0, 1, 37, 64, 100]
    tensors = draw(kind, _generator(kind), len(lengths), 100)
    state = draw_state(kind, _generator(), len(lengths))

    def padded(**given: Any) -> Any:
        out, final = KERNELS[kind](**given, lengths=torch.tensor(lengths))
        return [out[n, :length] for n, length in enumerate(lengths)], final

    def alone(**given: Any) -> Any:
        entering = _flat(given.pop("initial_state"))
        outs, finals = [], []
        for n, length in enumerate(lengths):
            piece = {name: x[n : n + 1, :length] if x.shape[:2] == (5, 100) else x for name, x in given.items()}
            out, final = KERNELS[kind](**piece, initial_state=_as_given([x[n : n + 1] for x in entering]))
            outs.append(out[0])
            finals.append(_flat(final))
        return outs, [torch.cat(parts) for parts in zip(*finals, strict=True)]

    expected = _with_gradients(alone, tensors, state)
    _assert_close(_with_gradients(padded, tensors, state), expected, 1e-13)


@pytest.mark.parametrize("length", [1, 64, 150, 330])
@pytest.mark.parametrize("kind", ["delta_rule", "delta_rule_by_channel"])
def test_transitions_lead_from_first_states_to_last(kind: str, length: int) -> None:
    tensors, state = draw(kind, _generator(kind), BATCH, length), draw_state(kind, _generator(), BATCH)
    q = tensors.pop("q")

    def last(**given: Any) -> Tensor:
        return DEFINITIONS[kind](q=q, **given)[1]

    def by_transition(initial_state: Tensor, **given: Any) -> Tensor:
        A, B = delta_chunks(q=q, **given).pair()
        return A @ initial_state + B

    expected = _with_gradients(last, tensors, state)
    for dtype, tolerance in TOLERANCES.items():
        _assert_close(_with_gradients(by_transition, tensors, state, dtype), expected, tolerance)


@pytest.mark.parametrize("length", [1, 150])
@pytest.mark.parametrize(
    ("kind", "read", "silenced"),
    [
        ("state_space", state_space_read, ("x", "B")),
        ("selective_scan", selective_scan_read, ("x", "B")),
    ],
)
def test_what_a_state_adds_to_outputs(kind: str, read: Callable[..., Tensor], silenced: Any, length: int) -> None:
    tensors, state = draw(kind, _generator(kind), BATCH, length), draw_state(kind, _generator(), BATCH)
    nothing = {name: torch.zeros_like(tensors.pop(name)) for name in silenced}

    def outputs(**given: Any) -> Tensor:
        return DEFINITIONS[kind](**given, **nothing)[0]

    def reads(initial_state: Tensor, **given: Any) -> Tensor:
        return read(**given, state=initial_state)

    expected = _with_gradients(outputs, tensors, state)
    for dtype, tolerance in TOLERANCES.items():
        _assert_close(_with_gradients(reads, tensors, state, dtype), expected, tolerance)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_convolutions(length: int, with_bias: bool, activation: str | None) -> None:
    tensors = draw("causal_convolution", _generator(length), 1, length)
    if not with_bias:
        del tensors["bias"]
    expected = _with_gradients(
        lambda **x: DEFINITIONS["causal_convolution"](**x, activation=activation), tensors, None
    )
    for dtype, tolerance in TOLERANCES.items():
        found = _with_gradients(lambda **x: causal_convolution(**x, activation=activation), tensors, None, dtype)
        _assert_close(found, expected, tolerance)


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_definitions_start_anew_at_each_bound(kind: str) -> None:
    tensors = draw(kind, _generator(kind), BATCH, 12)
    found = _flat(DEFINITIONS[kind](**tensors, bounds=[0, 5, 6, 12]))
    parts = []
    for first, end in ((0, 5), (5, 6), (6, 12)):
        part = {name: x[:, first:end] if x.shape[:2] == (BATCH, 12) else x for name, x in tensors.items()}
        parts.append(_flat(DEFINITIONS[kind](**part)))
    assert torch.equal(found[0], torch.cat([part[0] for part in parts], 1))
    assert all(torch.equal(x, y) for x, y in zip(found[1:], parts[-1][1:], strict=True))


@pytest.mark.parametrize("kind", KERNELS)
def test_pieces_without_tokens_and_batches_without_pieces(kind: str) -> None:
    state = draw_state(kind, _generator(), BATCH)
    tensors = {
        name: x[:, :0] if x.shape[:2] == (BATCH, 9) else x for name, x in draw(kind, _generator(), BATCH, 9).items()
    }
    found = _with_gradients(KERNELS[kind], tensors, state)
    assert found[0].shape[:2] == (BATCH, 0)
    states = len(_flat(state))
    assert all(torch.equal(x, y) for x, y in zip(found[1 : 1 + states], _flat(state), strict=True))
    out, final = KERNELS[kind](**draw(kind, _generator(), 0, 70))
    assert out.shape[:2] == (0, 70)
    assert [x.shape[1:] for x in _flat(final)] == [x.shape[1:] for x in _flat(state)]


@pytest.mark.parametrize("kind", KERNELS)
def test_outputs_have_the_type_of_values_and_states_are_float32(kind: str) -> None:
    drawn = {name: x.bfloat16() for name, x in draw(kind, _generator(kind), BATCH, 70).items()}
    out, final = KERNELS[kind](**drawn)
    expected, last = KERNELS[kind](**{name: x.float() for name, x in drawn.items()})
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    assert all(x.dtype == torch.float32 for x in _flat(final))
    assert all(torch.equal(x, y) for x, y in zip(_flat(final), _flat(last), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    def drawn(kind: str, **changed: Tensor) -> dict[str, Tensor]:
        return draw(kind, _generator(), 1, 8) | changed

    three = torch.zeros(1, 8, 3, 8)
    with pytest.raises(ValueError, match="3 heads of keys do not divide 4"):
        delta_rule(**drawn("delta_rule", q=three, k=three))
    with pytest.raises(ValueError, match="not for 4 heads of 8 channels"):
        delta_rule(**drawn("delta_rule", g=torch.zeros(1, 8, 4, 7)))
    with pytest.raises(ValueError, match="48, not a power of 2"):
        delta_rule(**drawn("delta_rule"), chunk_size=48)
    with pytest.raises(ValueError, match="3 groups do not divide 4"):
        state_space(**drawn("state_space", B=three, C=three))
    with pytest.raises(ValueError, match="do not fit"):
        selective_scan(**drawn("selective_scan", A=torch.zeros(4, 7)))
    with pytest.raises(ValueError, match=r"\[4, 3, 4, 4\] heads"):
        decay_attention(**drawn("decay_attention", k=three))
    with pytest.raises(ValueError, match="differ in shape"):
        linear_unit(**drawn("linear_unit", log_decay=three))
    with pytest.raises(ValueError, match="differ in shape"):
        rwkv(**drawn("rwkv", v=three))
    with pytest.raises(ValueError, match="do not fit"):
        mlstm(**drawn("mlstm", k=three))
    with pytest.raises(ValueError, match="'gelu'"):
        causal_convolution(**drawn("causal_convolution"), activation="gelu")
