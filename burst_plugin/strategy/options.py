"""The options of a run, parsed and validated once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from burst_plugin.checks import check_one_of, did_you_mean, shown
from burst_plugin.kernels import KERNELS, Kernel
from burst_plugin.schedule.rings import SCHEDULES, default_schedule_name
from burst_plugin.sequence.layout import LAYOUTS
from burst_plugin.strategy.presets import check_groups, with_preset
from burst_plugin.strategy.validation import (
    ALL_RANKS,
    AUTO,
    OF_NODE,
    PLACEMENTS,
    check_kernel,
    check_schedule,
    kept_share,
    validated,
)
from burst_plugin.strategy.validation import about as _about
from burst_plugin.topology import Groups, Topology
from burst_plugin.types import BOTH, DIRECTIONS, SIDES, Direction

if TYPE_CHECKING:
    from burst_plugin.profiling.cluster_profile import ClusterProfile, Model

PLANNED = ("schedule", "ulysses_degree", "ulysses_placement", "mesh_degree", "parts", "forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How attention is distributed. Every field has a default that suits most runs.

    The fields are described one by one below, and in docs/options.md. Besides:

    - forward, backward: moving queries are "pass-Q" forward (arXiv 2411.01783), BurstAttention backward (2403.09347);
      keys and values are "pass-KV", ring attention (2310.01889); both is DistFlashAttn's schedule (2310.03294).
    - kernel: also an object of your own, as `burst_plugin.kernels.Kernel` describes. Ranks compare them by name.
    - check: backward passes are compared if their forward passes were. On CPUs every message also carries a label of
      its call. "sparse" is refused on CPUs.
    - deterministic: `torch.use_deterministic_algorithms(True)` has the same effect. The ring itself is always
      deterministic: it adds partial results in the order of the schedule.

    Raises ValueError naming the option, what was got, and what is valid.
    """

    layout: str = field(
        default="zigzag",
        metadata=_about(
            f"the tokens that a rank holds: `{'`, `'.join(LAYOUTS)}`; `auto` chooses for each batch that is cut, or "
            "for [lengths and masks of your own](pytorch.md#masks-and-lengths)",
            (*LAYOUTS, AUTO),
        ),
    )
    schedule: str = field(
        default=AUTO,
        metadata=_about(
            f"`{'`, `'.join(SCHEDULES)}`; `auto`: two levels where there are several nodes of several "
            "ranks, and `direct` for masks that leave so little work that it sends less",
            (*SCHEDULES, AUTO),
        ),
    )
    forward: str = field(
        default="kv",
        metadata=_about(
            'the side that moves in forward passes: `q` ("pass-Q"), `kv` ("pass-KV", ring attention), or '
            "[`both`](internals.md#both-sides-may-move); `auto` takes the one with fewer bytes",
            (*SIDES, BOTH, AUTO),
        ),
    )
    backward: str = field(
        default=AUTO,
        metadata=_about(
            "the side that moves in backward passes: `q` (BurstAttention), `kv` (ring attention), or "
            "[`both`](internals.md#both-sides-may-move); `auto` takes the one with fewer bytes",
            (*SIDES, BOTH, AUTO),
        ),
    )
    kernel: str | Kernel = field(
        default=AUTO,
        metadata=_about(
            "one of the [kernels](kernels.md); `auto` takes the fastest that can do what is asked", (*KERNELS, AUTO)
        ),
    )
    ranks_per_node: int | str = field(
        default=AUTO,
        metadata=_about(
            "how many context-parallel ranks a node has; `auto`: what the hierarchy of groups says if there is one, "
            "else ranks ask each other for their node",
            words=(AUTO,),
        ),
    )
    parts: int | tuple[int, int] = field(
        default=1,
        metadata=_about(
            "into how many parts, by heads, blocks are cut, to be [sent one behind the other](internals.md#parts); "
            "two numbers: forward, backward. Must divide the number of a rank's key/value heads"
        ),
    )
    ulysses_degree: int | str = field(
        default=1,
        metadata=_about(
            "how many ranks [exchange heads](internals.md#heads-may-be-exchanged) before and after the "
            "ring; `node`: those of a node, `all`: all of the ring. Must divide the number of a rank's query heads, "
            "and the number of its key/value heads has to be a multiple or a divisor of it",
            words=(OF_NODE, ALL_RANKS),
        ),
    )
    ulysses_placement: str = field(
        default="head_first",
        metadata=_about(
            "which ranks [exchange heads](internals.md#heads-may-be-exchanged): `head_first`, neighbours; "
            "`context_first`, ranks as far apart as can be, so that rings are of neighbours",
            PLACEMENTS,
        ),
    )
    mesh_degree: int = field(
        default=1,
        metadata=_about(
            "how many neighbouring ranks [gather each other's blocks](internals.md#blocks-may-be-gathered) of the "
            "side that stays, so that rings are shorter: Mesh-Attention. Not with a `ulysses_degree`, nor with `both`"
        ),
    )
    max_ctas: int = field(
        default=8,
        metadata=_about(
            "how many thread blocks (CTAs) NCCL may take at once for [each communicator of the "
            "ring](internals.md#nccl), and of a GPU's multiprocessors with them: a power of two; 0: NCCL's own choice"
        ),
    )
    recurrent: str = field(
        default=AUTO,
        metadata=_about(
            "what ranks exchange in [layers that carry a state](recurrent.md) along the sequence: `state`, what "
            "their tokens do to it; `heads`, tokens of a share of the heads; `auto`: the one with fewer bytes",
            ("state", "heads", AUTO),
        ),
    )
    latents: str = field(
        default=AUTO,
        metadata=_about(
            "what ranks exchange in multi-head latent attention (MLA): `send`, [latents](sparse.md#latents), of "
            "which every rank makes keys and values; `expand`, keys and values; `auto`: latents where all heads are "
            "on one rank",
            ("send", "expand", AUTO),
        ),
    )
    check: str = field(
        default=AUTO,
        metadata=_about(
            "when ranks compare shapes, options and [where they are](pytorch.md#ranks-that-are-out-of-step): "
            "`always`; `sparse`, for GPUs: at calls 1, 2, 4, 8, ...; `auto`: always on CPUs, sparse on GPUs, where "
            "comparing makes the host wait",
            (AUTO, "always", "sparse"),
        ),
    )
    deterministic: bool = field(
        default=False, metadata=_about("whether to use only kernels that give the same bits twice")
    )
    memory: str = field(
        default=AUTO,
        metadata=_about(
            "how memory beside attention is saved in frameworks: `auto`: options that are left out are "
            "[chosen](memory.md#memory-auto) at the first step, as far as that costs no time; `off`: only by the "
            "options below",
            (AUTO, "off"),
        ),
    )
    keep_attention: float | str = field(
        default="none",
        metadata=_about(
            "which outputs of attention [activation checkpoints keep](memory.md#keeping-attention), so that the "
            "ring does not run forward twice: `none`, `all`, or a number such as `0.5`, the share of the sequence's "
            "tokens, the last ones, whose outputs are kept",
        ),
    )
    mlp_chunk: int = field(
        default=0,
        metadata=_about(
            "tokens per chunk of each MLP, which then [never exists whole](memory.md#mlp-in-chunks), and of each "
            "norm that is not one kernel; 0: all at once"
        ),
    )
    head_chunk: int = field(
        default=0,
        metadata=_about(
            "query heads that a layer [projects, exchanges and attends to](memory.md#heads-in-chunks) at once; 0: all"
        ),
    )
    loss_chunk: int = field(
        default=0,
        metadata=_about(
            "tokens per chunk of the [LM head and loss](memory.md#loss-in-chunks), so that logits are never whole in "
            "training; 0: whole logits"
        ),
    )
    offload: bool = field(
        default=False,
        metadata=_about(
            "whether what [activation checkpoints keep](memory.md#activations-on-the-host), inputs of layers and "
            "outputs of attention, waits for the backward pass in host memory"
        ),
    )
    late_after: float = field(
        default=60.0,
        metadata=_about(
            "how many seconds a rank on a CPU waits until a line in the log says which ranks wait for which",
            compared=False,
        ),
    )
    abort: bool = field(
        default=True,
        metadata=_about(
            "whether ranks on GPUs [end within seconds](pytorch.md#when-a-rank-fails-on-gpus) once another one of "
            "their ring has failed: by an error, and an abort of the ring's NCCL communicators"
        ),
    )

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        check_schedule(self.schedule)
        is_object = not isinstance(self.kernel, str) and isinstance(self.kernel, Kernel)  # the latter takes longer
        for each in fields(self):
            if each.metadata["choices"] and not (is_object and each.name == "kernel"):
                check_one_of(each.name, getattr(self, each.name), each.metadata["choices"])
        for name, value in validated(vars(self)).items():
            object.__setattr__(self, name, value)

    @property
    def kept_share(self) -> float:
        """Return the share of the sequence whose attention is kept across activation checkpoints."""
        return kept_share(self.keep_attention)

    @property
    def degree(self) -> int:
        """Return `ulysses_degree` as a number. Raises ValueError for a word, which `on` replaces."""
        if isinstance(self.ulysses_degree, str):
            raise ValueError(f"ulysses_degree={self.ulysses_degree!r} depends on the ring: use strategy.on(topology)")
        return self.ulysses_degree

    @property
    def group_size(self) -> int:
        """Return how many ranks form a group, which exchanges heads or blocks around the ring; 1 for no groups."""
        return self.degree * self.mesh_degree

    def groups(self, topology: Topology) -> Groups:
        """Return the division of ranks into groups, which exchange heads or blocks, and rings."""
        gathers, apart = self.mesh_degree > 1, self.ulysses_placement == "context_first"
        return Groups(topology, self.group_size, apart, "mesh_degree" if gathers else "ulysses_degree", gathers)

    def on(self, topology: Topology) -> Strategy:
        """Return the strategy of a ring on `topology`: `ulysses_degree` is a number then.

        Raises ValueError if ranks cannot form such groups there, and names the degrees that are possible.
        """
        if isinstance(self.ulysses_degree, str):
            degrees = {OF_NODE: topology.ranks_per_node, ALL_RANKS: topology.ranks}
            return replace(self, ulysses_degree=degrees[self.ulysses_degree]).on(topology)
        check_groups(self.groups(topology))
        return self

    @classmethod
    def of(cls, strategy: Strategy | None, **options: Any) -> Strategy:
        """Return `strategy`, or one made of keywords; `preset` sets several options, and other keywords override it.

        Raises ValueError for both at once, an unknown keyword, or an unknown preset.
        """
        if not isinstance(strategy, cls | None):
            raise ValueError(
                f"strategy={shown(strategy)} is not a Strategy; write Strategy(layout=...), or leave strategy= out "
                "and pass the options by name"
            )
        names = [*(each.name for each in fields(cls)), "preset"]
        for name in options:
            if name not in names:
                nearest = did_you_mean(name, names)
                raise ValueError(f"there is no option {name}{nearest}; the options are: {', '.join(names)}")
        if strategy is not None and options:
            raise ValueError(f"got strategy= and also {', '.join(sorted(options))}: put these into it, or drop it")
        return strategy if strategy is not None else cls(**with_preset(options))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Strategy:
        """Return the strategy of a published system by its name, such as "usp", with some options changed.

            Strategy.preset("ring", layout="zigzag")

        docs/systems.md has all, with their papers. Raises ValueError for other names, and options that are not valid.
        """
        return cls.of(None, preset=name, **changes)

    @classmethod
    def from_profile(
        cls,
        profile: str | os.PathLike[str] | Mapping[str, Any],
        *,
        topology: Topology | None = None,
        model: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> MeasuredStrategy:
        """Return a strategy that is planned from the measurements of `burst check`, for a model, when a ring is made.

            Strategy.from_profile("burst-profile.json", model={"q_heads": 64, "kv_heads": 8, "seq": 131072})

        Args:
            profile: the path of the file that it wrote, or the content of the file.
            topology: the topology of the ring, to be compared with the one that was measured.
            model: `q_heads`, `kv_heads` of a rank, `head_dim`, `seq`, `mask`; by default the model of `burst check`.
            options: fields that are set, which the plan keeps; also `preset`, whose fields are set then.

        Raises ValueError, with what differs, for a profile that is damaged or of another version, device or topology.
        """
        from burst_plugin.profiling.cluster_profile import ClusterProfile, device_name

        measured = ClusterProfile.read(profile)
        measured.check_cluster(topology, device_name())
        try:
            cls.of(None, **measured.strategy)
        except ValueError as error:
            raise ValueError(f"the profile is damaged: strategy: {error}; run burst check again") from None
        options = with_preset(options)
        fields_set, sizes = vars(cls.of(None, **options)), measured.model.of_sizes(model or {})
        given = tuple(sorted(name for name, value in options.items() if value != AUTO))
        return MeasuredStrategy(**fields_set, measured=measured, model=sizes, given=given)

    @cached_property
    def compared(self) -> Mapping[str, object]:
        """Return the options that must be equal on all ranks, in a form to compare: kernel objects by name."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["compared"]}
        return {**options, "kernel": self.kernel if isinstance(self.kernel, str) else self.kernel.name}

    def check_is_due(self, call: int, cheap: bool) -> bool:
        """Return whether ranks compare call number `call`, from 1 on. `cheap`: comparing stalls nothing."""
        return self.check == "always" or (self.check == AUTO and cheap) or call & (call - 1) == 0  # 1, 2, 4, 8, ...

    def parts_of(self, direction: Direction) -> int:
        """Return the number of parts that a pass sends each block in."""
        return self.parts if isinstance(self.parts, int) else self.parts[DIRECTIONS.index(direction)]

    def schedule_for(self, topology: Topology) -> str:
        """Return the name of the schedule for `topology`: the option `schedule`, or a choice if it is "auto"."""
        return default_schedule_name(topology) if self.schedule == AUTO else self.schedule


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MeasuredStrategy(Strategy):
    """A strategy whose ring, when it is made, plans the options of `PLANNED` that are not `given`, for `model`."""

    measured: ClusterProfile = field(repr=False, hash=False, metadata=_about(""))
    model: Model = field(metadata=_about(""))
    given: tuple[str, ...] = field(metadata=_about(""))
