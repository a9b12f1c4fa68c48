"""`ContextParallel`: a process group as a ring, with its topology, layout, schedule and communicators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from burst_plugin.activations.host_memory import offload_while_alive
from burst_plugin.activations.kept_attention import follow_torch
from burst_plugin.checks import shown
from burst_plugin.comm.call_identity import CallId
from burst_plugin.comm.process_groups import as_group, levels_of, place_in
from burst_plugin.comm.torch_distributed import DistributedTransport
from burst_plugin.moved_tokens import HeldTokens, WholeSequence, crosses_documents, shifted
from burst_plugin.ring.agreement import Agreement, consistency_check, prepared_together
from burst_plugin.ring.choices import make_plan
from burst_plugin.ring.connections import Connections, find_topology
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.head_groups import by_head_group
from burst_plugin.ring.plan import Plan
from burst_plugin.ring.rank_state import RankState
from burst_plugin.ring.request import ExtraTensors, Inputs, Request, as_tokens, both_sides, check_mask, token_dim
from burst_plugin.ring.routes import Attending, RouteTable
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens, positions, token_count
from burst_plugin.sequence.masks import Causal, Full, Mask
from burst_plugin.strategy import MeasuredStrategy, Strategy
from burst_plugin.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11

    from burst_plugin.profiling.recorder import Profile


class ContextParallel:
    """A context-parallel group: the ranks that hold one sequence between them.

    Make one per group and share it between layers. Creating it is collective, unless `ranks_per_node` or a hierarchy
    says which ranks share a node; so is the first attention call, which makes communicators that were not given.

    Args:
        group: the whole context-parallel ProcessGroup, or a DeviceMesh of one dimension; None for this rank alone,
            with `hierarchy=[1]` if there are other ranks.
        hierarchy: Megatron's hierarchical groups or their sizes, innermost first; fixes the ranks per node.
        strategy: all options together; None for the defaults.
        options: options of `Strategy` by name, or the name of a `preset`, in place of a strategy:
            `ContextParallel(group, preset="usp")`.

    Raises:
        ValueError: for an option that is not valid, sizes that do not multiply to the group's, a group that this
            rank is not in, or no group where there are several ranks.

    Attributes:
        strategy: the options, completed by the plan if a profile was given.
        group: the group of all ranks; None for a single rank.
        rank, ranks: the number of this rank in the group, and how many there are.
        rank_state: this rank's place in the ring.
        agreement: how this rank compares its calls with the other ranks' calls.
        connections: the communicators between ranks.
        chosen: the names of options that were left to `memory="auto"`, and have been chosen (`choose`).
        plans: plans for the kinds of attention calls made before; see `ring.choices.make_plan`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        hierarchy: Sequence[dist.ProcessGroup] | Sequence[int] | None = None,
        strategy: Strategy | None = None,
        **options: Any,
    ) -> None:
        strategy = Strategy.of(strategy, **options)
        group, levels = as_group(group), levels_of(hierarchy)
        if group is None and hierarchy is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"there are {dist.get_world_size()} ranks, and no group says which of them hold a sequence together: "
                "pass their process group, torch.distributed.group.WORLD for all, hierarchy=[1] for this rank alone"
            )
        self.chosen: frozenset[str] = frozenset()
        self._follow_checkpoints(strategy)
        self.rank, global_ranks = place_in(group)
        self.ranks = len(global_ranks)
        self.group = group if self.ranks > 1 else None  # one rank has no others to talk to
        consistency = consistency_check(self.group, self.rank, global_ranks, strategy)
        sizes = None if levels is None else [x if isinstance(x, int) else x.size() for x in levels]
        topology = find_topology(strategy, self.rank, self.ranks, sizes, consistency)
        self.strategy, self._planned = strategy.on(topology), ""
        if isinstance(self.strategy, MeasuredStrategy):
            from burst_plugin.planning.measured import planned  # which takes time to import

            self.strategy, self._planned = planned(self.strategy, topology, logs=global_ranks[self.rank] == 0)
        self.rank_state = RankState(
            self.rank,
            topology,
            self.strategy,
            DistributedTransport({}, global_ranks),  # both are replaced when ranks meet
            DistributedTransport({}, global_ranks),
            RouteTable(topology, self.strategy),
            is_process=consistency is not None,
            at_end=None if consistency is None else consistency.forget_shared_group,
        )
        self.agreement = Agreement(self.rank_state, consistency)
        groups = [level for level in levels or () if not isinstance(level, int)]
        self.connections = Connections(self.rank_state, self.group, groups, global_ranks, consistency)
        self.plans: dict[Hashable, Any] = {}

    def _follow_checkpoints(self, strategy: Strategy) -> None:
        follow_torch(needed=strategy.kept_share > 0 or strategy.offload)
        if strategy.offload:
            offload_while_alive(self)

    def choose(self, **options: Any) -> None:
        """Set options of this ring's strategy that `memory="auto"` left open, by name: `choose(loss_chunk=1024)`.

        All ranks have to set the same values, between two training steps. `chosen` lists the names from then on.
        """
        strategy = replace(self.strategy, **options)
        self._follow_checkpoints(strategy)
        self.strategy = self.rank_state.strategy = strategy
        self.chosen |= options.keys()

    def __copy__(self) -> ContextParallel:
        """Return itself: two objects would count the calls of one ring apart."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return itself: a copy of a model, for a moving average or as a reference, uses the same ring."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ContextParallel cannot be saved or sent to another process, since its process groups cannot: save a "
            "model's state_dict(), and make a ContextParallel where it is loaded"
        )

    @property
    def topology(self) -> Topology:
        """Return the group's topology: its nodes, and the ranks on each."""
        return self.rank_state.topology

    @between_graphs
    def warm_up(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = Causal(),
        scores: Scores = Scores(),
        tokens: Tokens | tuple[Tokens, Tokens] | None = None,
        **extras: Unpack[ExtraTensors],
    ) -> None:
        """Prepare for calls of one kind before the first step, so that they do not hold up a pass; collective.

        Arguments are as for `burst_attention`; shapes, types and strides of tensors matter, values do not. Creates
        communicators and buffers, chooses the kernel and tries it out, and runs the forward pass without messages,
        and the backward pass if any tensor has `requires_grad`: there libraries plan and compile. Without it, on GPUs
        the first passes of a kind do so themselves. Raises ValueError on every rank if any cannot do this.
        """
        whole = Inputs(q, k, v, **extras), Request(mask, scores, both_sides(tokens))
        for call in by_head_group(*whole) or [whole]:
            plan, _ = prepared_together(partial(self._warmed_up, *call), self._agree_on_warm_up)
            self.connect(plan.by_link)

    def _warmed_up(self, inputs: Inputs, request: Request) -> Plan:
        """Return the plan of a call, after both of its passes have run without their messages."""
        from burst_plugin.ring.warm_up import warm_up

        plan = make_plan(self.rank_state, inputs, request, self.plans)
        self.connections.check_device(plan.device)
        warm_up(plan, inputs)
        return plan

    def _agree_on_warm_up(self, plan: Plan | None, problem: str) -> int:
        return self.agree({} if plan is None else plan.signature, problem, of="a warm-up")

    def connect(self, by_link: Collection[bool] | None = None) -> None:
        """Create the communicators that are still missing; collective, and harmless when repeated.

        `by_link` says which sets to create: False in it stands for communicators that serve the links inside nodes
        and between nodes alike, True for one communicator per kind of link. None: the set of calls whose mask, such
        as a causal one, has every rank work on every block.
        """
        self.connections.connect(by_link)

    def close(self) -> None:
        """Destroy the communicators that this ring made, and let go of its buffers; all ranks call it together.

        For programs that make one ring after another. Attention, and backward passes of earlier calls, raise
        RuntimeError from then on. The groups that it was given stay; where `torch.distributed` has ended already,
        nothing is left to destroy. All ranks wait for each other first, but not while an exception is handled, as in
        `finally`, nor once a rank has given up; with NCCL communicators are aborted or left alone then, since
        destroying them could wait. Raises RuntimeError in the middle of a pass.
        """
        self.plans.clear()
        self.connections.close()

    def release(self) -> None:
        """Free this rank's buffers and plans without communicating; communicators stay.

        Attention raises RuntimeError from then on. Unlike `close`, it does not wait for the other ranks. Raises
        RuntimeError in the middle of a pass.
        """
        self.connections.release()
        self.plans.clear()

    @property
    def created_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the process groups made by this ring so far; each got the given group's timeout when it was made."""
        return tuple(self.connections.communicators.created)

    def agree(self, signature: Mapping[str, object], problem: str = "", of: str = "a batch") -> int:
        """Compare what all ranks are about to do, and return the number of this comparison; collective.

        Args:
            signature: the values that must be equal on all ranks, by the names that errors call them.
            problem: why this rank cannot go on, for errors on all ranks; "" if it can.
            of: what is compared, for errors.

        Returns:
            How many comparisons and attention calls this rank has made, this one included; equal on all ranks.

        Raises:
            ValueError: on every rank if any has a problem, or if ranks differ in `signature`, in their options, or in
                what they are about to do.
        """
        return self.agreement.agree(signature, problem, of)

    def meet(self, at: str) -> None:
        """Check that all ranks have come to the place that `at` names; collective.

        Ranks compare as often as they compare attention calls (`Strategy.check`): on GPUs by default at the calls 1,
        2, 4, 8, ... of `meet`. It is for places after which a rank that left something out would wait for ranks that
        wait here. Raises ValueError on every rank that compares if any is elsewhere.
        """
        self.agreement.meet(at)

    def shard(self, x: Tensor, dim: int = 1, tokens: Tokens | None = None) -> Tensor:
        """Return this rank's tokens of the whole sequence `x`, along `dim`.

        Where the length is not a multiple of the number of ranks, they hold unequal numbers: then pass
        `tokens=Tokens(length)` to `burst_attention` and `unshard`. Raises ValueError if `tokens` has another length.
        """
        dim = token_dim("x", x, dim)
        tokens = Tokens(x.shape[dim]) if tokens is None else as_tokens(tokens)
        return self.rank_state.route_table.layout(tokens).shard(x, dim, (self.rank, self.ranks), tokens)

    @between_graphs
    def unshard(
        self,
        local: Tensor,
        dim: int = 1,
        tokens: Tokens | None = None,
        *,
        loss: Literal["same", "own"] | None = None,
    ) -> Tensor:
        """Return the whole sequence from all ranks' `local`, along `dim`, on every rank; collective.

        Args:
            local: this rank's tokens along `dim`, of any dtype.
            dim: the dimension of tokens.
            tokens: the sequence, if it is not cut evenly.
            loss: the loss made of the sequence, where gradients are wanted. "same": every rank computes the same loss
                of the whole sequence, which counts once: the gradient of `local` is this rank's part of its own
                gradient. "own": every rank computes a loss of its own, and what counts is their sum, so that the
                gradient is this rank's part of the sum of all ranks' gradients, for which they communicate.

        Raises:
            RuntimeError: where there is a gradient and no `loss`.
            ValueError: on every rank if any does not hold its part of `tokens`, or if ranks pass different arguments.
        """
        if loss not in (None, "same", "own"):
            raise ValueError(f"loss={shown(loss)} is not valid; use 'same' or 'own', or leave it out")
        has_gradient = getattr(local, "requires_grad", False) and torch.is_grad_enabled()
        if has_gradient and loss is None:
            raise RuntimeError(
                "unshard has to know what is made of a tensor with a gradient: pass loss='same' if every rank "
                "computes the same loss of the whole sequence, loss='own' if the losses of ranks add up; or call "
                "it on x.detach()"
            )
        asked = {"loss": loss, "has a gradient": has_gradient}
        held, meet = self._held_together("unshard", local, dim, tokens, asked)
        if not has_gradient:
            return held.whole(local)
        meet_backward = meet if loss == "own" else None
        whole: Tensor = WholeSequence.apply(local, held, meet_backward)  # type: ignore[no-untyped-call]
        return whole

    @between_graphs
    def shift(
        self,
        local: Tensor,
        by: int,
        dim: int = 1,
        tokens: Tokens | None = None,
        *,
        mask: Mask | None = None,
        fill: float = 0,
    ) -> Tensor:
        """Return this rank's tokens of the sequence shifted by `by` places along `dim`; collective, also backward.

        By -1 every token takes the value of the next one, as for labels of next tokens; by 1 the value of the
        token before. In any layout, with a gradient.

        Args:
            local: this rank's tokens along `dim`, of any dtype.
            by: how many places, in the direction of `torch.roll`, which would let values in again at the other end.
            dim: the dimension of tokens.
            tokens: the sequence, if it is not cut evenly.
            mask: documents of this mask keep their values to themselves, and padding has none; for one sequence, or
                for each row of the first dimension of `local`.
            fill: the value of padding, and of tokens whose source is padding, outside the sequence, or outside their
                document.

        Raises:
            ValueError: on every rank if any does not hold its part of `tokens`, or if ranks pass different arguments.
        """
        state = self.rank_state
        has_gradient = getattr(local, "requires_grad", False) and torch.is_grad_enabled()
        asked = {"by": by, "mask": mask, "fill": fill, "has a gradient": has_gradient}
        held, meet = self._held_together("shift", local, dim, tokens, asked)
        if mask is not None and mask.rows is not None and (held.dim == 0 or mask.rows != local.shape[0]):
            raise ValueError(
                f"the mask has {mask.rows} rows, but local is {list(local.shape)} with tokens along dim {held.dim}; "
                "give tensors [rows, ...] with tokens along another dim"
            )
        shards = state.route_table.shards(held.tokens)
        empty = crosses_documents(
            shards[self.rank], held.tokens.length, by, Full() if mask is None else mask, local.device
        )
        moved = shifted(local, by, held.dim, shards, (self.rank, self.group), meet)
        sizes = [1] * local.dim()
        sizes[held.dim] = empty.shape[1]
        if empty.shape[0] > 1:
            sizes[0] = empty.shape[0]
        return torch.where(empty.view(sizes), moved.new_full((), fill), moved)  # masked_fill knows fewer types

    def _held_together(
        self, task: str, local: Tensor, dim: int, tokens: Tokens | None, asked: Mapping[str, object]
    ) -> tuple[HeldTokens, Callable[[], None]]:
        """Return how ranks hold the sequence of `local`, once all ranks ask for the same; collective.

        Also returns a function by which all ranks meet before the backward pass.
        """

        def agree(held: HeldTokens | None, problem: str) -> int:
            if held is None:
                return self.agree({}, problem)
            others = [*local.shape[: held.dim], *local.shape[held.dim + 1 :]]
            named = {task: held.tokens, "dim": held.dim, "other sizes": others, "dtype": local.dtype}
            return self.agree({**named, **asked})

        held, number = prepared_together(partial(self._held, local, dim, tokens), agree)
        return held, partial(self.agreement.before_backward, CallId(number, task, is_compared=True))

    def _held(self, local: Tensor, dim: int, tokens: Tokens | None) -> HeldTokens:
        """Return how ranks hold the sequence of `local`. Raise ValueError if this rank holds another number."""
        dim = token_dim("local", local, dim)
        # A rank without any token has to say so, too.
        tokens = Tokens(max(1, local.shape[dim] * self.ranks)) if tokens is None else as_tokens(tokens)
        lengths = [token_count(runs) for runs in self.rank_state.route_table.shards(tokens)]
        if local.shape[dim] != lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} holds {lengths[self.rank]} of {tokens.length} tokens, but local "
                f"{list(local.shape)} has {local.shape[dim]} along dim {dim}; pass the tokens= of its shard"
            )
        layout = self.rank_state.route_table.layout(tokens)
        return HeldTokens(dim, layout, tokens, tuple(lengths), self.rank, self.group)

    def positions(self, tokens: Tokens | int, device: torch.device | None = None) -> Tensor:
        """Return the global positions of this rank's tokens, [S_local], int64; `tokens` may be a length.

        They are on `device`, or on PyTorch's default device if that is None.
        """
        tokens = as_tokens(tokens, or_length=True)
        runs = self.rank_state.route_table.shards(tokens)[self.rank]
        return positions(runs, torch.get_default_device() if device is None else device)

    def blocks(self, tokens: Tokens | int, block: int) -> Tokens:
        """Return which ranks hold which blocks of `block` tokens, as `Tokens` that count blocks in place of tokens.

        With it `positions` gives the numbers of this rank's blocks, and `unshard` gathers from all ranks one row for
        each of their blocks: mean keys, say, and in the end which blocks of keys each block selected, so that all
        ranks make the same mask of it (`selected_blocks`).

        `tokens` is the sequence, or its length. Raises ValueError if a block lies on several ranks, or a rank has
        none.
        """
        from burst_plugin.sequence.block_masks import block_tokens  # rarely needed

        tokens = as_tokens(tokens, or_length=True)
        return block_tokens(self.rank_state.route_table.shards(tokens), tokens.length, block)

    @between_graphs
    def tokens(self, length: int, mask: Mask, *, alike: bool = False) -> Tokens:
        """Return the token layout for a sequence of `length` that balances computing and traffic under `mask`.

        Pass it as `tokens=` to all other functions. With `alike` all ranks hold equally many tokens, which a length
        from `even_length` always allows. Raises ValueError for a length that no layout divides equally then.
        """
        from burst_plugin.assignment.balance import choose_tokens  # rarely needed

        check_mask(mask)
        return choose_tokens(self.rank_state.route_table, length, mask, alike)

    @between_graphs
    def imbalance(self, mask: Mask, tokens: Tokens | int) -> float:
        """Return the largest of the ranks' attention work under `mask`, over the mean of all ranks; 1 is even.

        `tokens` is the sequence, or its length. It is 1 also where no rank has work.
        """
        from burst_plugin.assignment.balance import imbalance  # rarely needed

        check_mask(mask)
        tokens = as_tokens(tokens, or_length=True)
        return imbalance(self.rank_state.route_table, Attending(tokens, tokens, mask))

    def step(self, number: int, microbatch: int | None = None) -> None:
        """Note that the calls from now on belong to training step `number`, and to this microbatch of it.

        Ranks compare it before every pass that they compare, and on CPUs messages carry it, so that a rank that
        skipped a step is found at its next call, before anything of that is computed. Dropout of attention in models
        of transformers is drawn by it, so that a resumed run repeats it. Adapters of frameworks call this themselves.
        Not collective.
        """
        self.rank_state.draws.begin(number)
        self.rank_state.training_step = f"step {number}" + (
            "" if microbatch is None else f", microbatch {microbatch}"
        )

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank has sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`.

        Attention data only, without the `consistency.EXCHANGE_BYTES` per peer by which ranks compare their calls.
        """
        return self.rank_state.traffic()

    def expected_traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank should have sent, counted from the schedules of its calls.

        By link and kind, as `traffic` returns the bytes that it has sent: `{"intra": {"gather": n, "reduce": n},
        "inter": ...}`.
        """
        return self.rank_state.expected_traffic()

    def reset_traffic(self) -> None:
        """Set the counts of `traffic` and `expected_traffic` to zero."""
        self.rank_state.reset_traffic()

    def allocated_bytes(self) -> int:
        """Return the bytes of all communication buffers; they stop growing once every kind of call was made twice.

        NCCL's own are not among them: see `describe`.
        """
        return sum(pool.allocated_bytes for pool in self.rank_state.pools)

    def describe(self) -> dict[str, str]:
        """Return the choices made: topology, schedule, layout and, after the first call, kernel and moving_sides.

        With a profile also the plan, the reason for it, and the runner-up; with NCCL also the memory that it has for
        the peers met so far, by its source, on an H100.
        """
        state, degrees = self.rank_state, ("ulysses_degree", "mesh_degree")
        nccl_bytes = state.transport.backend_bytes + state.ulysses_transport.backend_bytes
        return {
            "topology": str(self.topology),
            **{name: str(degree) for name in degrees if (degree := getattr(self.strategy, name)) > 1},
            "schedule": self.rank_state.route_table.schedule_name,
            "layout": self.strategy.layout,
            **({"plan": self._planned} if self._planned else {}),
            **self.rank_state.choices,
            **({"nccl_buffers": f"{nccl_bytes / 2**20:.0f} MiB"} if nccl_bytes else {}),
        }

    def profile(self) -> AbstractContextManager[Profile]:
        """Return a context that records this rank's computing, messages and waits; see `Profile`."""
        from burst_plugin.profiling.recorder import Profile

        return self.rank_state.profiled(Profile(self.rank, self.topology, self.group))
