"""Scores of queries on keys, in tiles: the same to the last bit whichever tile a query and a key are in.

    I[t, s] = sum over heads of  weights[t, h] * relu(scale * q[t, h] . k[s])

Libraries multiply matrices of different shapes in different ways, and round differently: a vector by a matrix, say.
So all products are those of matrices of one shape, filled up with zeros, whose rows and columns are all computed
alike. What comes after is done number by number, in an order that heads alone decide, each operation rounded by
itself. So neither the layout, nor the number of ranks, nor where a tile begins has a part in a score.

Products of rows and columns that are alike in all of a tile were bit-equal with MKL on AMD EPYC, for any shape but
vectors, 1 or 2 threads, float32 and float64, heads of 8 to 128. On GPUs it has not been looked at: there
`tests/sparse/test_sparse_on_gpu.py` says whether it holds. Ranks whose CPUs or GPUs are of different models may
round differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

_MOST_QUERIES = 512  # in a tile of few heads
_SHAPES = {"cpu": (1024, 256)}  # rows (queries by heads) and columns (keys) of a product
_USUAL_SHAPE = (8192, 1024)  # 32 MiB of float32


class ScoreTiles:
    """How large tiles are for a number of heads, a type (float32 or float64) and a device.

    queries, keys: at most so many are in a tile.
    """

    def __init__(self, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        rows, self.keys = _SHAPES.get(device.type, _USUAL_SHAPE)
        self.queries = max(1, min(_MOST_QUERIES, rows // heads))
        self._rows = -(-self.queries * heads // 64) * 64  # a whole number of what processors compute at once
        self.dtype = dtype

    def of_queries(self, q: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what computes the scores of q [queries, H, D] with weights [queries, H] on keys.

        It takes k [keys, D] and returns [queries, keys].
        """
        products, weights = self._products(q), weights.to(self.dtype).unsqueeze(2)

        def scores(k: Tensor) -> Tensor:
            by_head, left = products(k).relu_().mul_(weights), q.shape[1]
            while left > 1:  # halves are added, since the order of a sum over heads would be the library's
                half = (left + 1) // 2
                by_head[:, : left - half] += by_head[:, half:left]
                left = half
            return by_head[:, 0] + 0.0  # which makes 0 of -0: they are a tie

        return scores

    def of_heads(self, q: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what computes the products of q [queries, H, D] with keys, by themselves: no relu, no weights.

        It takes k [keys, D] and returns [queries, H, keys].
        """
        products = self._products(q)
        return lambda k: products(k) + 0.0  # which makes 0 of -0: they are a tie

    def _products(self, q: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what multiplies q [queries, H, D] with keys [keys, D], to [queries, H, keys]."""
        queries, heads, _ = q.shape
        rows = self._filled(q.flatten(0, 1), self._rows)

        def products(k: Tensor) -> Tensor:
            found = rows @ self._filled(k, self.keys).t()
            return found[: queries * heads].view(queries, heads, -1)[..., : len(k)]

        return products

    def _filled(self, x: Tensor, rows: int) -> Tensor:
        """Return a new tensor with the rows of x [n, D], then zeros; libraries heed where in memory one begins."""
        return pad(x.to(self.dtype), (0, 0, 0, rows - len(x)))
