"""What is left of a ring when its work is taken away: a kernel that returns constants, and a count of what is made.

Both are for measuring the package's own Python, on tensors so small that arithmetic takes no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_plugin.kernels import Case, Grads, How, Queries


class ConstantKernel:
    """A kernel that returns the same tensors, made once per shape, whatever it is given."""

    name = "constant"
    features = frozenset({"windows"})

    def __init__(self) -> None:
        self._made: dict[tuple[torch.Size, torch.Size], tuple[Tensor, Tensor, Grads]] = {}

    def refuse(self, case: Case) -> str | None:
        """It can do anything, and nothing."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        out, lse, _ = self._of(q, k)
        return out, lse

    def backward(self, queries: Queries, k: Tensor, v: Tensor, how: How) -> Grads:
        """See `Kernel.backward`."""
        return self._of(queries.q, k)[2]

    def _of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Grads]:
        key = (q.shape, k.shape)
        if key not in self._made:
            wide = torch.promote_types(q.dtype, torch.float32)
            lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=wide)
            grads = Grads(*(torch.ones(x.shape, dtype=wide) for x in (q, k, k)))
            self._made[key] = (torch.ones(q.shape, dtype=wide), lse, grads)
        return self._made[key]


class CountedTensors(TorchDispatchMode):
    """Counts, as a context manager, operations and the tensors with memory of their own that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.tensors = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and _memory(x) not in given]
        self.operations += 1
        self.tensors += len(made)
        self.nbytes += sum(x.untyped_storage().nbytes() for x in made)
        return found


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
