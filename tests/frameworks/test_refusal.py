"""What all ranks refuse is told once, and is never lost."""

from __future__ import annotations

import contextlib
import io
from datetime import timedelta

import pytest

from burst_plugin.frameworks import options
from tests.support.ranks import run_ranks


def _refuse() -> str:
    """Return what this rank prints when it refuses."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as left, options.exit_if_refused():
        raise ValueError("--x is not supported: drop it")
    assert left.value.code == 1
    return printed.getvalue()


def test_a_script_without_ranks_is_told() -> None:
    assert _refuse() == "burst_plugin: --x is not supported: drop it\n"


def test_what_rank_0_does_not_refuse_is_told_by_another_rank() -> None:
    def refuse(rank: int) -> str:
        options.PATIENCE = timedelta(seconds=0.2)
        return _refuse() if rank == 1 else ""

    assert run_ranks(refuse, 2) == ["", "burst_plugin: --x is not supported: drop it\n"]


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"), options.exit_if_refused():
        raise RuntimeError("a bug")
