"""Process groups of NCCL that are not there: they have options, ranks and a name, and move nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from burst_plugin.comm import process_groups

_UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT


@dataclass
class Config:
    """What is used of `ncclConfig_t`."""

    min_ctas: int = _UNSET
    max_ctas: int = _UNSET


class Options:
    """Those of a group, whose `config` is copied when it is set, as pybind11 does."""

    def __init__(self, is_high_priority_stream: bool = False, config: Any = None) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._config = Config() if config is None else config
        self._timeout = timedelta(minutes=10)

    @property
    def config(self) -> Any:
        return self._config

    @config.setter
    def config(self, config: Any) -> None:
        self._config = copy.copy(config)


@dataclass(eq=False)
class NcclGroup:
    """A group of these global ranks."""

    ranks: Sequence[int]
    options: Options = field(default_factory=Options)
    name: str = "given"

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: "nccl", options=self.options, supports_coalescing=True)


@contextmanager
def nccl() -> Iterator[list[NcclGroup]]:
    """Have process groups be those of NCCL until the end of the block; yield those that are made."""
    made: list[NcclGroup] = []

    def new_group(ranks: Sequence[int], *, pg_options: Options, group_desc: str, **_: Any) -> NcclGroup:
        made.append(NcclGroup(ranks, pg_options, group_desc))
        return made[-1]

    with (
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "get_process_group_ranks", lambda group: list(group.ranks)),
        mock.patch.object(process_groups, "group_device", return_value=torch.device("cuda", 0)),
        mock.patch.object(process_groups, "warm_up"),
        mock.patch.object(process_groups, "created_by_members_alone", return_value=nullcontext()),
    ):
        yield made
