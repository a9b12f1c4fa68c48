"""The process groups that a ring is given: checked, with a clear error for anything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from burst_plugin.checks import as_listed, shown, whole_number


def as_group(group: object) -> dist.ProcessGroup | None:
    """Return the group, or that of a mesh's only dimension. Raise ValueError for larger meshes and anything else."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"got a mesh of {group.ndim} dimensions, {group.mesh_dim_names}; pass the one of the "
                'context-parallel ranks, such as mesh["cp"]'
            )
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group's, where a rank is left out
        raise _outsider(group)
    raise ValueError(
        f"group is {shown(group)}, not a process group; pass the context-parallel ProcessGroup, such as "
        'torch.distributed.group.WORLD, or a DeviceMesh of one dimension, mesh["cp"]'
    )


def _outsider(group: object) -> ValueError:
    here = f" (global rank {dist.get_rank()})" if dist.is_initialized() else ""
    return ValueError(
        f"this process{here} is not in the group it was given ({group}); pass the context-parallel group that this "
        "rank belongs to"
    )


def levels_of(
    hierarchy: Sequence[dist.ProcessGroup] | Sequence[int] | None,
) -> list[dist.ProcessGroup | int] | None:
    """Return hierarchical groups or their sizes as a list. Raise ValueError for anything else."""
    if hierarchy is None:
        return None
    expected = "give a list of sizes or of process groups, innermost first, such as [8, 2]"
    levels: list[dist.ProcessGroup | int] = []
    for level in as_listed("hierarchy={}", hierarchy, expected):
        if isinstance(level, dist.ProcessGroup):
            levels.append(level)
        else:
            levels.append(whole_number("hierarchy=[...] with a level of {}", level, expected, None))
    return levels


def place_in(group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """Return the number of this rank within the group, and the global ranks of all of its ranks."""
    if group is None:
        return 0, [0]
    if dist.get_rank(group) < 0:
        raise _outsider(group)
    return dist.get_rank(group), dist.get_process_group_ranks(group)
