"""Prints how far two runs' losses and gradient norms are apart: compare.py RING.json ONE_RANK.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_LARGEST = 1e-3  # relative; a wrong scale or a wrong token order is far beyond


def main() -> int:
    ring, one = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    print(f"{len(ring)} steps{'':15}4 ranks, burst     1 rank, without    largest difference")
    worst = 0.0
    for name in ("loss", "grad_norm"):
        pairs = [(a[name], b[name]) for a, b in zip(ring, one, strict=True)]
        apart = max(abs(a - b) / abs(b) for a, b in pairs)
        worst = max(worst, apart)
        columns = (f"{pairs[0][i]:.4f} -> {pairs[-1][i]:.4f}" for i in (0, 1))
        print(f"  {name:18}" + "".join(f"{column:19}" for column in columns) + f"{apart:.1e} relative")
    print("equal" if worst <= _LARGEST else f"NOT equal: more than {_LARGEST:.0e} apart")
    return worst > _LARGEST


if __name__ == "__main__":
    sys.exit(main())
