"""Scores of queries on keys, in tiles: a score is the same to the last bit whichever tile it is computed in.

    I[t, s] = sum over heads of  weights[t, h] * relu(scale * q[t, h] . k[s])

Libraries multiply matrices of different shapes in different ways, and round differently: a vector by a matrix, say.
So all products multiply matrices of one shape, filled up with zeros, whose rows and columns are all computed alike.
The steps after that go number by number, in an order that heads alone decide, each operation rounded by itself. So
neither the layout, nor the number of ranks, nor where a tile begins has a part in a score.

Rows and columns of a product are only computed alike where a library has no remainder of its blocks left: MKL has
blocks of 12 columns for float64 with AVX-512, and rounds the last 4 of 256 columns otherwise. So shapes are multiples
of 192. The first product of every kind is one of equal rows and columns, and a warning says if it is not the same
everywhere. Ranks whose CPUs or GPUs are of different models may round differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_MOST_QUERIES = 512  # in a tile of few heads
_BLOCK = 192  # a whole number of what processors compute at once: 4, 6, 8, 12, 16, 24, 32, 48, 64 or 96
SHAPES = {"cpu": (960, 192)}  # rows (queries by heads) and columns (keys) of a product
USUAL_SHAPE = (8064, 960)  # on other devices: 30 MiB of float32
_LOG = logging.getLogger(__name__)


class ScoreTiles:
    """Computes scores of queries on keys in tiles of one size, which suits a number of heads, a type and a device.

    dtype: float32 or float64, of scores.
    queries, keys: at most so many are in a tile.
    """

    def __init__(self, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        rows, self.keys = SHAPES.get(device.type, USUAL_SHAPE)
        self.queries = max(1, min(_MOST_QUERIES, rows // heads))
        self._rows = -(-self.queries * heads // _BLOCK) * _BLOCK
        self.dtype = dtype

    def of_queries(self, q: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the scores of q [queries, H, D] with weights [queries, H] on keys.

        The function takes k [keys, D] and returns [queries, keys], the sum over heads of weights * relu(q . k).
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
        """Return a function that computes the products of q [queries, H, D] with keys, without relu and weights.

        The function takes k [keys, D] and returns [queries, H, keys].
        """
        products = self._products(q)
        return lambda k: products(k) + 0.0  # which makes 0 of -0: they are a tie

    def _products(self, q: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies q [queries, H, D] with keys [keys, D], to [queries, H, keys]."""
        queries, heads, _ = q.shape
        rows = self._filled(q.flatten(0, 1), self._rows)
        if type(rows) is Tensor:  # no fake one
            warn_unless_alike((*rows.shape, self.keys), rows.dtype, rows.device)

        def products(k: Tensor) -> Tensor:
            found = rows @ self._filled(k, self.keys).t()
            return found[: queries * heads].view(queries, heads, -1)[..., : len(k)]

        return products

    def _filled(self, x: Tensor, rows: int) -> Tensor:
        """Return a new tensor with the rows of x [n, D], then zeros; libraries heed where in memory one begins."""
        return pad(x.to(self.dtype), (0, 0, 0, rows - len(x)))


@cache
def warn_unless_alike(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Multiply equal rows by equal columns once, and log a warning unless all products are equal to the last bit.

    `shape` is (rows, length, columns) of the two matrices, [rows, length] and [length, columns].
    """
    rows, length, columns = shape
    number = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    row, column = ((number * factor).sin().to(dtype) for factor in (1.7, 2.3))
    product = row.expand(rows, -1).contiguous() @ column.expand(columns, -1).contiguous().t()
    if bool((product == product[0, 0]).all()):
        return
    _LOG.warning(
        "matrix products of %s x %s by %s x %s in %s on %s round differently by their place in a tile: keys of "
        "nearly equal scores may be selected differently on another number of ranks, or in another layout",
        rows, length, length, columns, dtype, device,
    )  # fmt: skip
