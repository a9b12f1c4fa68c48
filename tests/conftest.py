"""Hides GPUs from all tests but `-m gpu` and `-m nccl`, begins with the longest tests, and saves processor time."""

import gc
import os
from time import monotonic

import pytest

from tests.support.huge_pages import use_huge_pages
from tests.support.imports import repeat_imports

_HUGE_PAGES_S = 30.0  # after which enough huge pages are split to be worth putting together again
_made_huge = 0.0


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs: a process that has initialised CUDA cannot fork ranks."""
    if config.option.markexpr not in ("gpu", "nccl"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each worker its share of the slow tests, and first: none is left to run at the end, beside idle ones.

    Workers begin with equal stretches of all tests and take over others' once they have none of their own.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        slow = [item for item in items if item.get_closest_marker("slow")]
        others = [item for item in items if not item.get_closest_marker("slow")]
        length, files = -(-len(others) // workers), list(dict.fromkeys(item.path for item in slow))
        items[:] = [
            item
            for n in range(workers)
            for item in (
                *(each for each in slow if each.path in files[n::workers]),  # whole files, which keep what they made
                *others[n * length : (n + 1) * length],
            )
        ]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported so far out of garbage collections, which took a tenth of the time of all tests."""
    if session.config.option.markexpr not in ("alone", "gpu", "nccl"):
        from tests.support.gloo_threads import calm_gloo_threads  # imports PyTorch, as workers have by now

        calm_gloo_threads()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a further 6 % of tests/planning; also of the ranks that tests fork


@pytest.hookimpl(tryfirst=True)  # before fixtures replace anything
def pytest_runtest_setup() -> None:
    """Import what ranks of earlier tests have imported, and keep huge pages, which forks split little by little."""
    global _made_huge
    repeat_imports()
    if monotonic() - _made_huge > _HUGE_PAGES_S:
        use_huge_pages()
        _made_huge = monotonic()


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything when it ends."""
    gc.unfreeze()
