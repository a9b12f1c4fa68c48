"""Compute a recurrent layer by an exchange of heads.

Where ranks have many tokens, half of the messages travel while heads are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burst_plugin.recurrent.heads import check_heads, gathered, parts_of_heads
from burst_plugin.recurrent.messages import Messages
from burst_plugin.recurrent.placement import Call, ExchangeInFlight, Placement
from burst_plugin.sequence.layout import Tokens


def by_heads(
    function: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    place: Placement,
    finals: bool,
) -> Any:
    """Compute a layer by an exchange of heads; return outputs, or with `finals` (outputs, states); collective.

    Where ranks have many tokens, and an even number of heads of each tensor, heads are cut into two parts. The second
    part arrives while the first is computed, and the outputs of the first leave while the second is computed.

    function: the layer, which takes tensors, parameters, a `place` and `return_final_state` by name.
    tensors: [B, S_local, H, ...], by name; the heads of each can be shared evenly between ranks, see `can_share`.
    parameters: [H, ...] of all heads, by name.
    place: see `Placement`.
    finals: whether to return the states after the last tokens of rows, too, on every rank, without gradient.
    """
    heads, ranks = [x.shape[2] for x in tensors.values()], place.passes.states[0].topology.ranks

    def check() -> dict[str, object]:
        check_heads(ranks, heads)
        return {"sizes": [list(x.shape[2:]) for x in tensors.values()], "final state": finals}

    call = place.call("an exchange of heads", tensors, check, tuple(parameters.values()))
    held = call.held
    parts = parts_of_heads(ranks, heads, held.average_tokens)
    xs = [held.in_rank_order(x).chunk(parts, 2) for x in tensors.values()]
    in_flight: list[ExchangeInFlight] = []

    def exchange(to: Sequence[int] | None, xs: Sequence[Tensor], is_hidden: bool = False) -> ExchangeInFlight:
        in_flight.append(call.exchange_heads(to, xs, is_hidden))
        return in_flight[-1]

    back = [max(heads) // parts]
    computed: list[Any] = []
    left: list[Tensor] = []
    try:
        arriving = exchange(None, [x[0] for x in xs])
        for part in range(parts):
            sequences, leaving = arriving.wait(), None
            if part + 1 < parts:
                arriving = exchange(None, [x[part + 1] for x in xs], is_hidden=True)
            elif computed:
                leaving = exchange(back, [computed[-1][0]], is_hidden=True)
            own_heads = _heads_of_process(call, max(heads), (part, parts))
            initial = [x[:, own_heads] for x in place.initial]
            alone = Placement(place.alone(), place.mask, Tokens(held.tokens.length), initial=initial)
            arguments = dict(zip(tensors, sequences, strict=True)) | {
                name: x[own_heads] for name, x in parameters.items()
            }
            result = function(**arguments, place=alone, return_final_state=finals)
            computed.append(result if finals else (result,))
            left += [] if leaving is None else leaving.wait()
        left += exchange(back, [computed[-1][0]]).wait()
    except BaseException:
        for flight in in_flight:
            flight.exchange.abandon()
        raise
    out = held.from_rank_order(torch.cat(left, 2) if parts > 1 else left[0])
    return (out, torch.cat([_gathered(call, last) for _, last in computed], 1)) if finals else out


def _heads_of_process(call: Call, heads: int, part: tuple[int, int]) -> slice:
    """Return which of all heads the ranks of this process compute in part (number, parts), as a slice."""
    number, parts = part
    plans, first, count = call.held.head_plans(call.tensors[0].device), number * heads // parts, heads // parts
    begin, end = (plan.heads_of(plan.rank_state.rank, count) for plan in (plans[0], plans[-1]))
    return slice(first + begin.start, first + end.stop)


def _gathered(call: Call, last: Tensor) -> Tensor:
    """Gather the final states of all heads of a part from `last`, this process's, [B, h, ...]; collective."""
    plans = call.held.head_plans(call.tensors[0].device)
    programs = []
    for plan, states in zip(plans, last.detach().chunk(len(plans), 1), strict=True):
        messages = Messages(plan.rank_state, last.device, "final states", "forward", call.number)
        programs.append(gathered(plan, messages, states))
    whole: Tensor = call.held.passes.run("forward", call.number, programs, last.device)[0]
    return whole
