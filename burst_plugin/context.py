"""`ContextParallel`: a process group as a ring, with its topology, layout, schedule and communicators."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from burst_plugin.activations.host_memory import offload_while_alive
from burst_plugin.activations.kept_attention import follow_torch
from burst_plugin.comm.consistency import DISAGREE, prepared_together
from burst_plugin.comm.given_groups import as_group, levels_of, place_in
from burst_plugin.ring.graph_breaks import between_graphs
from burst_plugin.ring.head_groups import by_head_group
from burst_plugin.ring.request import ExtraTensors, Inputs, Request, as_tokens, both_sides, check_mask, token_dim
from burst_plugin.ring.routes import Attending
from burst_plugin.ring.session import Session
from burst_plugin.schedule.rings import BY_NODE
from burst_plugin.scores import Scores
from burst_plugin.sequence.layout import Tokens, positions, token_count
from burst_plugin.sequence.masks import Causal, Mask
from burst_plugin.strategy import MeasuredStrategy, Strategy
from burst_plugin.topology import Topology, node_id, node_sizes

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since 3.11

    from burst_plugin.profiling.recorder import Profile

__all__ = ["ContextParallel"]

_LOG = logging.getLogger(__name__)
_NODE = "node: "


class ContextParallel(Session):
    """A context-parallel group: the ranks that hold one sequence between them.

    Make one per group and share it between layers. Creating it is collective, unless `ranks_per_node` or a hierarchy
    says which ranks share a node; so is the first attention call, which makes communicators that were not given.

    Args:
        group: the whole context-parallel ProcessGroup, or a DeviceMesh of one dimension; None for a single rank; if
            there are others, together with `hierarchy=[1]`.
        hierarchy: Megatron's hierarchical groups or their sizes, innermost first; fixes the ranks per node.
        strategy: all options together.
        options: those of `Strategy`, by name, or `preset`, in place of one: `ContextParallel(group, preset="usp")`.

    Raises:
        ValueError: for an option that is not valid, sizes that do not multiply to the group's, a group that this
            rank is not in, or no group where there are several ranks.
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
        follow_torch(needed=strategy.kept_share > 0 or strategy.offload)
        if strategy.offload:
            offload_while_alive(self)
        groups = [level for level in levels or () if not isinstance(level, int)]
        super().__init__(group, groups, *place_in(group), strategy)
        sizes = None if levels is None else [x if isinstance(x, int) else x.size() for x in levels]
        topology = self._find_topology(sizes)
        self.strategy, self._planned = strategy.on(topology), ""
        if isinstance(self.strategy, MeasuredStrategy):
            from burst_plugin.planning.measured import planned  # which takes time to import

            self.strategy, self._planned = planned(self.strategy, topology, logs=self._global_ranks[self.rank] == 0)
        self._begin(topology)

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
        """Return the nodes and ranks per node."""
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
        """Do before the first step what would hold it up in the middle of a pass; collective.

        Arguments are those of `burst_attention`; of tensors shapes, types and strides matter, values do not. Creates
        communicators and buffers, chooses the kernel and tries it out, and runs the passes without their messages,
        the backward pass if any tensor has `requires_grad`: there libraries plan and compile. On GPUs first passes of
        a kind do the same by themselves. Raises ValueError on every rank if any cannot do this.
        """
        whole = Inputs(q, k, v, **extras), Request(mask, scores, both_sides(tokens))
        for call in by_head_group(*whole) or [whole]:
            self._warm_up(*call)

    def shard(self, x: Tensor, dim: int = 1, tokens: Tokens | None = None) -> Tensor:
        """Return this rank's tokens of the whole sequence `x`, along `dim`.

        Where the length is not a multiple of the number of ranks, they hold unequal numbers: then pass
        `tokens=Tokens(length)` to `burst_attention` and `unshard`. Raises ValueError if `tokens` has another length.
        """
        dim = token_dim("x", x, dim)
        tokens = Tokens(x.shape[dim]) if tokens is None else as_tokens(tokens)
        return self.rank_state.route_table.layout(tokens).shard(x, dim, (self.rank, self.ranks), tokens)

    @between_graphs
    def unshard(self, local: Tensor, dim: int = 1, tokens: Tokens | None = None) -> Tensor:
        """Return the whole sequence from all ranks' `local`, along `dim`, on every rank; collective.

        For looking at results: raises RuntimeError where gradients would be lost. Raises ValueError on every rank if
        any does not hold its part of `tokens`, or if ranks pass different arguments.
        """
        if getattr(local, "requires_grad", False) and torch.is_grad_enabled():
            raise RuntimeError(
                "unshard has no gradient; call it on x.detach() or under torch.no_grad(), and compute losses on "
                "the shard"
            )

        def agree(held: tuple[int, Tokens, list[int]] | None, problem: str) -> int:
            if held is None:
                return self.agree({}, problem)
            others = [*local.shape[: held[0]], *local.shape[held[0] + 1 :]]
            return self.agree({"unshard": held[1], "dim": held[0], "other sizes": others, "dtype": local.dtype})

        (dim, tokens, lengths), _ = prepared_together(partial(self._held, local, dim, tokens), agree)
        layout, held = self.rank_state.route_table.layout(tokens), lengths[self.rank]
        if self.group is None:
            return layout.unshard([local], dim, tokens)
        padded = local.contiguous()
        if held < max(lengths):
            padded = local.new_zeros((*local.shape[:dim], max(lengths), *local.shape[dim + 1 :]))
            padded.narrow(dim, 0, held).copy_(local)
        shards = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(shards, padded, group=self.group)
        whole = [shard.narrow(dim, 0, length) for shard, length in zip(shards, lengths, strict=True)]
        return layout.unshard(whole, dim, tokens)

    def _held(self, local: Tensor, dim: int, tokens: Tokens | None) -> tuple[int, Tokens, list[int]]:
        """Return the dimension and the sequence that `local` is cut along, and how many tokens each rank holds.

        Raises ValueError if this rank holds another number.
        """
        dim = token_dim("local", local, dim)
        # A rank without any token has to say so, too.
        tokens = Tokens(max(1, local.shape[dim] * self.ranks)) if tokens is None else as_tokens(tokens)
        lengths = [token_count(runs) for runs in self.rank_state.route_table.shards(tokens)]
        if local.shape[dim] != lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} holds {lengths[self.rank]} of {tokens.length} tokens, but local "
                f"{list(local.shape)} has {local.shape[dim]} along dim {dim}; pass the tokens= of its shard"
            )
        return dim, tokens, lengths

    def positions(self, tokens: Tokens | int, device: torch.device | None = None) -> Tensor:
        """Return the global positions of this rank's tokens, [S_local], int64; `tokens` may be a length.

        They are on `device`, or on PyTorch's default device if that is None.
        """
        tokens = as_tokens(tokens, or_length=True)
        runs = self.rank_state.route_table.shards(tokens)[self.rank]
        return positions(runs, torch.get_default_device() if device is None else device)

    def blocks(self, tokens: Tokens | int, block: int) -> Tokens:
        """Return the blocks of `block` tokens that ranks hold of a sequence, as `Tokens` of as many blocks.

        With it `positions` gives the numbers of this rank's blocks, and `unshard` gathers from all ranks what each
        knows of its own: their mean keys, and in the end which blocks of keys they selected, so that all ranks make
        the same mask of it (`selected_blocks`). `tokens` may be a length. Raises ValueError if a block lies on
        several ranks.
        """
        from burst_plugin.sequence.block_masks import block_tokens  # rarely needed

        tokens = as_tokens(tokens, or_length=True)
        return block_tokens(self.rank_state.route_table.shards(tokens), tokens.length, block)

    @between_graphs
    def tokens(self, length: int, mask: Mask, *, alike: bool = False) -> Tokens:
        """Return the token layout for a sequence of `length` that balances computing and traffic under `mask`.

        Pass it as `tokens=` to all other functions. With `alike` all ranks hold equally many tokens, for which
        lengths of `even_length` are suitable. Raises ValueError for other lengths then.
        """
        from burst_plugin.ring.load_balance import choose_tokens  # rarely needed

        check_mask(mask)
        return choose_tokens(self.rank_state.route_table, length, mask, alike)

    @between_graphs
    def imbalance(self, mask: Mask, tokens: Tokens | int) -> float:
        """Return the most over the mean of the ranks' attention work; 1 is even."""
        from burst_plugin.ring.load_balance import imbalance  # rarely needed

        check_mask(mask)
        tokens = as_tokens(tokens, or_length=True)
        return imbalance(self.rank_state.route_table, Attending(tokens, tokens, mask))

    def step(self, number: int, microbatch: int | None = None) -> None:
        """Note that the calls from now on belong to training step `number`, and to this microbatch of it.

        Ranks compare it before every pass that they compare, and on CPUs messages carry it, so that a rank that
        skipped a step is found at its next call, before anything of that is computed. Adapters of frameworks call
        this themselves. Not collective.
        """
        self.rank_state.training_step = f"step {number}" + (
            "" if microbatch is None else f", microbatch {microbatch}"
        )

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank has sent: `{"intra": {"gather": n, "reduce": n}, "inter": {...}}`.

        Attention data only, without the `consistency.EXCHANGE_BYTES` per peer by which ranks compare their calls.
        """
        return self.rank_state.traffic()

    def expected_traffic(self) -> dict[str, dict[str, int]]:
        """Return what `traffic` should be, as the schedule counts it for the calls made."""
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

        With a profile also what was planned, why, and the runner-up; with NCCL also the memory that it has for the
        peers met so far, by its source, on an H100.
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
        """Return a context in which this rank notes what it computes, sends and waits for; see `Profile`."""
        from burst_plugin.profiling.recorder import Profile

        return self.rank_state.profiled(Profile(self.rank, self.topology, self.group))

    def _find_topology(self, sizes: list[int] | None) -> Topology:
        per_node = self.strategy.ranks_per_node
        if isinstance(per_node, int) or sizes is not None:
            return Topology.from_sizes(self.ranks, sizes, per_node if isinstance(per_node, int) else None)
        if self._consistency is None:
            return Topology(1, 1)
        said = self._consistency.exchange(f"{_NODE}{self.strategy.schedule} {node_id()}", "looking for nodes")
        if not all(text.startswith(_NODE) for text in said):
            raise ValueError(DISAGREE + "only some ask for nodes to be detected: give all the same ranks_per_node")
        schedules, ids = zip(*(text.removeprefix(_NODE).split(" ", 1) for text in said), strict=True)
        topology = Topology.from_node_ids(ids)
        if topology is None:
            return self._without_nodes(node_sizes(ids), [name for name in schedules if name in BY_NODE])
        if self.rank == 0 and len(set(ids)) != topology.nodes:
            _LOG.info("nodes of %s ranks count as %s", _listed(node_sizes(ids)), topology)
        return topology

    def _without_nodes(self, sizes: Sequence[int], impossible: Sequence[str]) -> Topology:
        """Return the topology of one flat ring over nodes of such sizes, or interleaved ones, of which rank 0 warns.

        `impossible` are the schedules of any rank that need nodes of one size. Raises ValueError if there are some.
        """
        found = f"nodes have {_listed(sizes)} ranks" if sizes else "the ranks of a node are not side by side"
        if impossible:
            least = min(sizes, default=0)
            other = f"a group with {least} ranks of each node" if least > 1 else "a group that is spread like that"
            raise ValueError(
                f"schedule={impossible[0]!r} needs nodes with equally many ranks of the context-parallel "
                f"group, side by side, and here {found}: use schedule='auto', which is one flat ring then, {other}, "
                "or say with ranks_per_node how many ranks count as a node"
            )
        if self.rank == 0:
            warnings.warn(
                f"the {self.ranks} ranks of the context-parallel group are not spread evenly, in consecutive runs, "
                f"over the nodes ({found}): using one flat ring; pass ranks_per_node or hierarchy to say otherwise",
                stacklevel=4,
            )
        return Topology(1, self.ranks)


def _listed(sizes: Sequence[int]) -> str:
    *first, last = map(str, sorted(set(sizes)))
    return f"{', '.join(first)} and {last}" if first else last
