"""One message for all ranks of a script whose flags are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = "burst_plugin/refused"
_PATIENCE = timedelta(seconds=10)  # ranks have met already, and rank 0 refuses what all of them refuse


@contextmanager
def exit_if_refused() -> Iterator[None]:
    """Turn a ValueError that every rank raises into exit status 1 and one message on stderr, without tracebacks.

    Rank 0 prints the message. The other ranks wait for that, since a launcher ends all ranks once the first has
    failed; a rank that has waited in vain prints the message itself.

    Raises:
        SystemExit: the block has raised a ValueError.
    """
    try:
        yield
    except ValueError as error:
        _tell_once(f"burst_plugin: {error}")
        raise SystemExit(1) from None


def _tell_once(message: str) -> None:
    if not dist.is_initialized():
        print(message, file=sys.stderr, flush=True)
        return
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # of a store whose host has gone: nobody waits there
            store.set(_KEY, "")
        return
    try:
        store.wait([_KEY], _PATIENCE)
    except dist.DistNetworkError:  # the store has gone with rank 0, which had said so before
        return
    except RuntimeError:
        print(message, file=sys.stderr, flush=True)
