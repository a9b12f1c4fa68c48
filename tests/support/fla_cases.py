"""Kernels of flash-linear-attention on CPUs, where Triton interprets them, beside definitions.

TRITON_INTERPRET=1 python -m tests.support.fla_cases     # prints errors by name, as JSON
"""

from __future__ import annotations

import builtins
import json
import sys
import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from burst_plugin import Documents, Strategy, Topology, VirtualRing, recurrent
from burst_plugin.recurrent import segments
from burst_plugin.recurrent.kernels import fla_delta_rule
from tests.support.recurrences import DEFINITIONS

_BOUNDS = (0, 3, 58, 60)


class _Number(int):
    """A number of a loop, which kernels convert to another type."""

    def to(self, *_: object) -> _Number:
        """Return the number."""
        return self


def _interpreted() -> None:
    """Have kernels take their first configuration, and loops over numbers, on any device."""
    from triton.runtime.autotuner import Autotuner

    def timed(self: Any, *_: Any, config: Any, **__: Any) -> list[float]:
        return [1.0 + self.configs.index(config)] * 3

    Autotuner._bench = timed
    from fla.ops.cp import chunk_fwd

    chunk_fwd._check_cp_device = lambda device: None
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.__dict__.setdefault("range", lambda *ends: map(_Number, builtins.range(*map(int, ends))))


def _drawn(by_channel: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, _BOUNDS[-1], 2, size, generator=draw) for size in (16, 16, 8))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, gates = (torch.rand(1, _BOUNDS[-1], 2, *size, generator=draw) for size in ((16,) * by_channel, ()))
    return {"q": q, "k": k, "v": v, "g": -0.05 * g, "beta": gates}


def _on_ring(by_channel: bool) -> dict[str, float]:
    """Return errors of a layer on a virtual ring of three ranks in the library's stages, in float32."""
    library = fla_delta_rule.rule_of(by_channel)
    xs = {name: x.requires_grad_() for name, x in _drawn(by_channel).items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in xs.items()}

    def kernel(*inputs: Tensor) -> Any:
        return library(*inputs[:5], initial_state=inputs[5], output_final_state=True)

    pair = partial(fla_delta_rule.pair_by_library, library, kernel, False)
    place = recurrent.Placement(VirtualRing(Topology(1, 3), Strategy(recurrent="state")), Documents(_BOUNDS))
    with (
        mock.patch.object(fla_delta_rule, "is_usable", return_value=True),
        mock.patch.object(fla_delta_rule, "are_right", return_value=True),
        mock.patch.object(fla_delta_rule, "_pair", side_effect=fla_delta_rule._pair) as used,
    ):
        out = recurrent.gated_delta_rule(**xs, place=place, kernel=kernel, pair=pair)
    assert used.call_count, "nothing was computed in stages"
    scaled = {**exact, "q": exact["q"] * exact["q"].shape[3] ** -0.5}
    expected, _ = DEFINITIONS["delta_rule_by_channel" if by_channel else "delta_rule"](**scaled, bounds=_BOUNDS)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, list(xs.values()), dout)
    true = torch.autograd.grad(expected, list(exact.values()), dout.double())
    pairs = {"out": (out, expected), **dict(zip(xs, zip(found, true, strict=True), strict=True))}
    return {name: float(((x.double() - y).norm() / y.norm()).detach()) for name, (x, y) in pairs.items()}


def _in_segments(library: Any, sizes: fla_delta_rule.RuleSizes) -> float:
    """Return the error of the stages where pieces have more elements than kernels count."""
    with (
        mock.patch.multiple(segments, STEP=64, OFFSETS=64 * sizes.shared * sizes.key_dim + 1),
        mock.patch.object(library, "maps", wraps=library.maps) as maps,
    ):
        error = fla_delta_rule.worst_error(torch.device("cpu"), sizes)
    assert [len(call.kwargs["hm"]) for call in maps.mock_calls] == [4], "two pieces have two segments each"
    return error


def main() -> None:
    """Print errors of the stages beside the library's function, and of a layer on a ring beside its definition."""
    warnings.simplefilter("ignore")
    library = fla_delta_rule._library()
    assert library is not None, "another version"
    _interpreted()
    by_channel = sys.argv[1:] == ["by_channel"]
    sizes = fla_delta_rule.RuleSizes(by_channel, 2, 80, 16, torch.float32)
    print(json.dumps({"stages": _in_segments(library, sizes), **_on_ring(by_channel)}))


if __name__ == "__main__":
    main()
