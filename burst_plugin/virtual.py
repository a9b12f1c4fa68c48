"""All ranks of a ring in one process: the same schedule, executor and kernels, without a network.

To check on a laptop what a cluster will compute:

    ring = burst_plugin.VirtualRing(burst_plugin.Topology(nodes=2, ranks_per_node=4))
    out, lse = ring.attention(q, k, v)        # whole sequences; both are differentiable
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burst_plugin.activations.kept_attention import unseen_by_selective_checkpoints
from burst_plugin.checks import shown, whole_number
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.in_process import HostileNetwork, InProcessNetwork
from burst_plugin.planning.measured import planned
from burst_plugin.profiling.recorder import Profile
from burst_plugin.ring.attention_pass import Saved, backward_program, cut_loose, dense, forward_program
from burst_plugin.ring.autograd import check_derivative
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.executor import lockstep
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.head_groups import by_head_group, joined
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import (
    ExtraTensors,
    Inputs,
    Outputs,
    Request,
    Wanted,
    both_sides,
    check_extras,
    check_kinds,
    shapes_of,
)
from burst_plugin.ring.routes import RouteTable
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.strategy import Strategy
from burst_plugin.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11


class VirtualRing:
    """A ring whose ranks, `topology.ranks` of them, all run in this process, one thread, without a network.

    strategy: the options of the ring; None for the defaults.
    seed: the order in which messages arrive. The network is hostile on purpose (`comm.in_process`): it delivers late
        and in a random order.
    network: another network, such as one of plain copies (`comm.copies`) to measure time.
    """

    def __init__(
        self,
        topology: Topology,
        strategy: Strategy | None = None,
        *,
        seed: int = 0,
        network: InProcessNetwork | None = None,
    ) -> None:
        if not isinstance(topology, Topology):
            raise ValueError(
                f"topology={shown(topology)} is not a Topology; write Topology(nodes=1, ranks_per_node=4)"
            )
        strategy, _ = planned(Strategy.of(strategy).on(topology), topology)
        seed = whole_number("VirtualRing(seed={})", seed, "use an integer", None)
        self.network = network or HostileNetwork(topology.ranks, seed)
        table = RouteTable(topology, strategy)
        # Of the ring, and of its Ulysses group.
        wires = zip(self.network.transports(), self.network.transports(), strict=True)
        self.rank_states = [RankState(rank, topology, strategy, *ends, table) for rank, ends in enumerate(wires)]
        self.plans: dict[Hashable, Any] = {}  # of calls that are no attention
        self._number = 0
        self._known: list[dict[Hashable, Plan]] = [{} for _ in self.rank_states]

    def __copy__(self) -> VirtualRing:
        """Return itself: two objects would count the calls of one ring apart."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualRing:
        """Return itself: copies of a model use one ring, as with a `ContextParallel`."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a VirtualRing cannot be saved or sent to another process, since its ranks meet in this one: save a "
            "model's state_dict(), and make a VirtualRing where it is loaded"
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = Causal(),
        scores: Scores = Scores(),
        softmax_scale: float | None = None,
        tokens: Tokens | tuple[Tokens, Tokens] | None = None,
        **extras: Unpack[ExtraTensors],
    ) -> tuple[Tensor, Tensor]:
        """Compute `burst_attention` of whole sequences: return (out [B, Sq, Hq, Dv], lse [B, Hq, Sq]).

        Args:
            q, k, v: whole sequences, [B, Sq, Hq, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv].
            mask, scores, softmax_scale: as for `burst_attention`.
            tokens: the sequence, or a pair for queries and keys; needed only to cut every document by itself, or to
                choose another assignment to ranks.
            extras: `sink` [Hq], whose gradient is the sum over ranks; `bias` and `selection`, of all queries.
        """
        request = Request(mask, scores, both_sides(tokens), lse=True, scale=softmax_scale)
        return self._attend(Inputs(q, k, v, **extras), request)

    def latent_attention(
        self,
        q: Tensor,
        latents: Tensor,
        shared_keys: Tensor,
        *,
        weight: Tensor | None = None,
        mask: Mask = Causal(),
        scores: Scores = Scores(),
        tokens: Tokens | tuple[Tokens, Tokens] | None = None,
        **extras: Unpack[ExtraTensors],
    ) -> tuple[Tensor, Tensor]:
        """Compute `burst_plugin.latent_attention` of whole sequences: return (out [B, S, Hq, Dv], lse [B, Hq, S]).

        Args:
            q: [B, S, Hq, D].
            latents, shared_keys: [B, S, 1, C], normalised, and [B, S, 1, R], with rotary embedding.
            weight: of the up-projection, [Hq * (D - R + Dv), C]; its gradient is the sum over ranks. None: queries
                are in the space of latents, D = C + R, and Dv = C.
            mask, scores, tokens, extras: as for `attention`.
        """
        whole = Inputs(q, latents, shared_keys, **extras, weight=weight)
        return self._attend(whole, Request(mask, scores, both_sides(tokens), lse=True, latents=True))

    @between_graphs
    def _attend(self, all_inputs: Inputs, request: Request) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of whole sequences."""
        check_kinds(all_inputs, request)
        shapes = shapes_of(all_inputs, request.latents)
        q_tokens, kv_tokens = request.tokens
        tokens = q_tokens or Tokens(shapes.q_len), kv_tokens or Tokens(shapes.kv_len)
        check_extras(all_inputs, tokens[1].length)
        request = request._replace(tokens=tokens)
        if all_inputs.sink is not None:  # ranks' gradients add up
            all_inputs = all_inputs._replace(
                sink=all_inputs.sink.to(torch.promote_types(all_inputs.sink.dtype, torch.float32))
            )
        calls = by_head_group(all_inputs, request) or [(all_inputs, request)]
        outputs = []
        for inputs, plans in [self._planned(*call, tokens) for call in calls]:  # all are planned before any is run
            with unseen_by_selective_checkpoints():
                flat = VirtualRingAttention.apply(plans, self.next_call(), *(x for one in inputs for x in one))  # type: ignore[no-untyped-call]
            outputs.append(self._unsharded([Outputs(*one) for one in by_rank(flat, len(plans))], tokens[0]))
        out, lse, _ = joined(outputs)
        assert lse is not None, "it is asked for"
        return out, lse

    def next_call(self) -> CallId:
        """Count one more call on this ring, and return the identity that its messages carry on all ranks."""
        self._number += 1
        return CallId(self._number)

    def _planned(
        self, all_inputs: Inputs, request: Request, tokens: tuple[Tokens, Tokens]
    ) -> tuple[list[Inputs], list[Plan]]:
        """Return the inputs of every rank, and the plan of every rank."""
        inputs = self._sharded(all_inputs, *tokens)
        plans = [
            make_plan(rank_state, rank_inputs, request, known)
            for rank_state, rank_inputs, known in zip(self.rank_states, inputs, self._known, strict=True)
        ]
        for plan in plans:
            plan.rank_state.note_call(plan.choices)
        return inputs, plans

    def _unsharded(self, outputs: Sequence[Outputs], tokens: Tokens) -> Outputs:
        """Return out and lse of the whole sequence, from every rank's shard."""
        layout = self.rank_states[0].route_table.layout(tokens)
        lse = layout.unshard([each.lse for each in outputs if each.lse is not None], 2, tokens)
        return Outputs(layout.unshard([each.out for each in outputs], 1, tokens), lse)

    def _sharded(self, inputs: Inputs, q_tokens: Tokens, kv_tokens: Tokens) -> list[Inputs]:
        """Return the shards of whole tensors that every rank gets."""

        def shards(x: Tensor, tokens: Tokens, dim: int = 1) -> list[Tensor]:
            layout, ranks = self.rank_states[0].route_table.layout(tokens), len(self.rank_states)
            return [layout.shard(x, dim, (rank, ranks), tokens) for rank in range(ranks)]

        nothing: list[Tensor | None] = [None] * len(self.rank_states)
        whose = (q_tokens, kv_tokens, kv_tokens)
        q, k, v = (shards(x, tokens) for x, tokens in zip(inputs[:3], whose, strict=True))
        bias = nothing if inputs.bias is None else shards(inputs.bias, q_tokens, 2)
        selection = inputs.selection
        keys = nothing if selection is None else shards(selection, q_tokens, selection.dim() - 2)
        sharded = zip(q, k, v, bias, keys, strict=True)
        return [inputs._replace(q=q, k=k, v=v, bias=rows, selection=chosen) for q, k, v, rows, chosen in sharded]

    @contextmanager
    def profile(self) -> Iterator[list[Profile]]:
        """Record what each rank does until the end of the `with` block; yields a `Profile` per rank, in rank order.

        All ranks take turns in one process: waits are for copies in memory, never for another rank to get ready.
        """
        with ExitStack() as stack:
            yield [
                stack.enter_context(rank_state.profiled(Profile(rank_state.rank, rank_state.topology)))
                for rank_state in self.rank_states
            ]

    def traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """Return the bytes that `rank` has sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`."""
        return self.rank_states[rank].traffic()

    def expected_traffic(self, rank: int) -> dict[str, dict[str, int]]:
        """Return the bytes that `rank` should have sent, counted from the schedules of its calls.

        By link and kind, as `traffic`: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`.
        """
        return self.rank_states[rank].expected_traffic()


class VirtualRingAttention(torch.autograd.Function):
    """The autograd function of attention on a virtual ring: it runs the passes of all ranks in turn.

    Inputs, outputs and gradients are flat: all tensors of rank 0, then all of rank 1, and so on.
    """

    @staticmethod
    def forward(ctx: Any, plans: Sequence[Plan], call: CallId, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        with ExitStack() as passes:
            for plan in plans:
                passes.enter_context(plan.rank_state.one_pass("forward", call, plan.device))
            inputs = [dense(Inputs(*of_rank)) for of_rank in by_rank(tensors, len(plans))]
            results = lockstep([forward_program(plan, call, x) for plan, x in zip(plans, inputs, strict=True)])
            ctx.save_for_backward(
                *(x for _, saved in results for x in (*cut_loose(saved.given), saved.out, saved.lse))
            )
        ctx.plans, ctx.call, ctx.shapes = plans, call, [outputs.out.shape for outputs, _ in results]
        ctx.mark_non_differentiable(*(outputs.max_logits for outputs, _ in results if outputs.max_logits is not None))
        ctx.set_materialize_grads(False)
        return tuple(x for outputs, _ in results for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        check_derivative()
        plans, call, programs = ctx.plans, ctx.call, []
        upstream = by_rank(grad_outputs, len(plans))
        saved = [Saved(Inputs(*of_rank[:-2]), *of_rank[-2:]) for of_rank in by_rank(ctx.saved_tensors, len(plans))]
        wanted = ctx.needs_input_grad[2:]
        uses_lse = any(dlse is not None for _, dlse, _ in upstream)
        for n, wants in enumerate(by_rank(wanted, len(plans))):
            dout, dlse, _ = upstream[n]
            dout = saved[n].given.q.new_zeros(ctx.shapes[n]) if dout is None else dout
            programs.append(
                backward_program(plans[n], call, (dout, dlse), saved[n], Wanted.of(wants)._replace(from_lse=uses_lse))
            )
        with ExitStack() as passes:
            for plan in plans:
                passes.enter_context(plan.rank_state.one_pass("backward", call, plan.device))
            grads = [grad for of_rank in lockstep(programs) for grad in of_rank]
        return None, None, *(grad if wants else None for wants, grad in zip(wanted, grads, strict=True))


def by_rank(flat: Sequence[Any], ranks: int) -> list[tuple[Any, ...]]:
    """Split a flat sequence, all items of rank 0, then all of rank 1, and so on, into one tuple for each rank."""
    count = len(flat) // ranks
    return [tuple(flat[count * rank : count * (rank + 1)]) for rank in range(ranks)]
