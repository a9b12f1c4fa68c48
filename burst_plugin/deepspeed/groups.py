"""The process groups of a DeepSpeed run with burst attention: rings, and what DeepSpeed is told about groups.

    4 ranks, context_parallel_size=2         rank  0 1 | 2 3
                                    context-parallel   0 1 | 0 1
                                      data-parallel    0 0 | 1 1

With sequence parallelism DeepSpeed's ZeRO stages scale gradients differently: 0, 1 and 2 sum over sequence ranks, 3
averages over all ranks. `Unit` therefore says that there is no sequence parallelism, and has all ranks reduce
gradients and share partitions. Then every stage averages over all ranks, and the loss is scaled accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from burst_plugin.comm.process_groups import new_group_like


@dataclass(frozen=True)
class EngineGroups:
    """The process groups of an engine with burst attention.

    context: the ranks that share a sequence with this one, its ring.
    alone: this rank only.
    world: all ranks.
    """

    context: Any
    alone: Any
    world: Any


class Unit:
    """An `mpu`, the object that DeepSpeed asks for groups. It must not have `get_data_parallel_group`.

    Groups of model and tensor parallelism have one rank, so that checkpoints record a tensor-parallel degree of 1.
    """

    def __init__(self, groups: EngineGroups) -> None:
        self._groups = groups
        size = dist.get_world_size(groups.context)
        self._data_size, self._data_rank = dist.get_world_size() // size, dist.get_rank() // size

    def initialize_sequence_parallel(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DeepSpeed takes the presence of this method as a sign of model-parallel groups of one rank."""

    def get_sequence_parallel_group(self) -> Any:
        return self._groups.alone

    def get_sequence_parallel_world_size(self) -> int:
        return 1

    def get_sequence_parallel_rank(self) -> int:
        return 0

    def get_sequence_data_parallel_group(self) -> Any:
        return self._groups.world

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return self._data_size

    def get_data_parallel_rank(self) -> int:
        return self._data_rank

    def get_model_parallel_group(self) -> Any:
        return self._groups.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


class RequestedSize:
    """An `mpu` without groups, which only asks for rings of `size` ranks, as Accelerate's `sp_size` does.

    is_beside: whether it is for a model beside the one that Accelerate prepares, such as a reference model.
    """

    def __init__(self, size: int, *, is_beside: bool = False) -> None:
        self.size = size
        self.is_beside = is_beside

    def get_sequence_parallel_group(self) -> RequestedSize:
        return self

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % self.size


def make_groups(size: int, mpu: Any = None) -> EngineGroups:
    """Return the process groups for rings of `size` consecutive ranks; collective.

    `mpu` is a user's `mpu` with sequence-parallel groups, which become the rings; None to make new ones.
    """
    from deepspeed.utils import groups

    world, rank = groups._clone_world_group(), dist.get_rank()
    default_group: Any = dist.group.WORLD
    mark = [token_hex(8)]
    dist.broadcast_object_list(mark)
    first = rank // size * size
    if mpu is not None:
        context = mpu.get_sequence_parallel_group()
    else:
        context = new_group_like(default_group, range(first, first + size), f"BURST_CONTEXT_{first}_{mark[0]}")
    return EngineGroups(context, new_group_like(default_group, [rank], f"BURST_ALONE_{rank}_{mark[0]}"), world)


def sequence_parallel_size(mpu: Any) -> int:
    """Return the sequence-parallel size of a user's `mpu`; 1 if it has none."""
    ask = getattr(mpu, "get_sequence_parallel_world_size", None)
    return 1 if ask is None else int(ask())


def mpu_problem(mpu: Any, size: int) -> str:
    """Return why a user's `mpu` cannot be used with rings of `size` ranks; "" if it can, or is None."""
    if mpu is None:
        return ""
    way_out = "pass no mpu, or one whose sequence-parallel groups are the rings"
    name = getattr(mpu, "__name__", type(mpu).__name__)
    if name.endswith("parallel_state_sp"):
        return f"mpu={name} belongs to Ulysses, which does not go together with burst attention: {way_out}"
    for kind in ("model", "tensor_model", "pipeline_model", "pipe", "slice"):
        ask = getattr(mpu, f"get_{kind}_parallel_world_size", None)
        if ask is not None and ask() > 1:
            return f"mpu={name} has {kind}-parallel size {ask()}, which has not been tried: {way_out}"
    if sequence_parallel_size(mpu) != size or not hasattr(mpu, "get_sequence_parallel_group"):
        return (
            f"mpu={name} conflicts: its sequence-parallel size is {sequence_parallel_size(mpu)}, expected "
            f"context_parallel_size={size}: {way_out}"
        )
    ranks = dist.get_process_group_ranks(mpu.get_sequence_parallel_group())
    first = dist.get_rank() // size * size
    if ranks != list(range(first, first + size)):
        return f"mpu={name} conflicts: its sequence-parallel ranks are {ranks}, expected consecutive ones: {way_out}"
    return ""
