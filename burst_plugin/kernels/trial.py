"""A trial of a kernel's library on the current GPU: whether it computes there what a trusted kernel computes.

A library may have no kernel that runs on a newer GPU, or one that is wrong there, without an error; and a build of it
may have left out what others have, such as a cap on scores or some head dims.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from burst_plugin.kernels.protocol import Case, How, Kernel, Queries
from burst_plugin.scores import Scores
from burst_plugin.types import CAUSAL, FULL, Band

RESULTS = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = 0.01  # relative: two ways to round to 16 bits; what is left out or mixed up is far more
_ROWS = 256
_WINDOW = Band(-100, 20)
_SOFTCAP = 2.0  # under which most scores are bent
_FEATURES = frozenset({"softcap", "windows"})  # which a tile can be tried with


def problem_of(kernel: Kernel, trusted: Kernel, case: Case) -> str | None:
    """Return the fault of a kernel, tried on small tiles like `case`; None if it agrees with a trusted kernel.

    There is one trial for each GPU, type, number of heads, head dim, and use of windows and caps, if both have them.
    """
    device = torch.device(case.device, torch.cuda.current_device()) if case.device == "cuda" else case.device
    features = case.features & _FEATURES & kernel.features & trusted.features
    tried = case._replace(features=features, new_tiles=False)
    return problem_on_device(kernel, trusted, torch.device(device), tried)  # type: ignore[arg-type]  # kernels have a hash


@cache
def problem_on_device(kernel: Kernel, trusted: Kernel, device: torch.device, case: Case) -> str | None:
    """Return why a kernel is wrong on a device, or None, for a case of the features that are tried; once per case."""
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            wrong = _wrong(kernel, trusted, device, case)
    except torch.OutOfMemoryError:  # which says nothing about the kernel, and is not cached
        raise
    except Exception as error:  # whatever the library raises
        return f"tried out, it fails: {type(error).__name__}: {error}"
    return f"tried out, {', '.join(wrong)} are not those of {trusted.name}" if wrong else None


def _wrong(kernel: Kernel, trusted: Kernel, device: torch.device, case: Case) -> list[str]:
    """Return the results that differ, of a causal and of a full tile, and of a window if there are any."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(rows: int, heads: int, dim: int) -> Tensor:
        drawn = torch.randn(1, rows, heads, dim, generator=generator, device="cpu", dtype=torch.float32)
        return drawn.to(device, case.dtype)

    wrong: dict[str, None] = {}
    scores = Scores(scale=case.qk_dim**-0.5, softcap=_SOFTCAP if "softcap" in case.features else None)
    windows = ((_WINDOW, _ROWS),) if "windows" in case.features else ()
    for band, keys in ((CAUSAL, _ROWS), (FULL, 2 * _ROWS), *windows):
        q, dout = (draw(_ROWS, case.query_heads, dim) for dim in (case.qk_dim, case.v_dim))
        k, v = (draw(keys, case.kv_heads, dim) for dim in (case.qk_dim, case.v_dim))
        how = How(band, scores)
        expected = trusted.forward(q, k, v, how)
        queries = Queries(q, dout, expected[0].to(q.dtype), expected[1])
        results, references = (
            (*outputs, *each.backward(queries, k, v, how)[:3])
            for each, outputs in ((kernel, kernel.forward(q, k, v, how)), (trusted, expected))
        )
        for name, result, reference in zip(RESULTS, results, references, strict=True):
            if not difference(result, reference) < TOLERANCE:  # NaN is wrong, too
                wrong[name] = None
    return list(wrong)


def difference(one: Tensor, other: Tensor) -> float:
    """Return the 2-norm of `one - other`, divided by the 2-norm of `other`."""
    return float(((one.double() - other.double()).norm() / other.double().norm()).item())
