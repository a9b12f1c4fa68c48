"""BurstAttention in Megatron-core: `install()`, then Megatron's own flags.

    burst_plugin.megatron.install()
    TransformerConfig(..., context_parallel_size=4, cp_comm_type="burst")
    # or: --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 --cp-comm-type burst

Importing this package imports no Megatron; `install()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst_plugin.megatron.batches.packed import packed_indices
from burst_plugin.strategy import Strategy

if TYPE_CHECKING:
    from burst_plugin.megatron.adapter import MegatronAdapter

__all__ = ["install", "packed_indices"]


def install(strategy: Strategy | None = None) -> MegatronAdapter:
    """Make `cp_comm_type="burst"` known to Megatron-core, once per process; repeated calls change nothing.

    Args:
        strategy: options for all layers. None: the `--burst-*` flags if Megatron's argument parser ran, else the
            defaults.

    Returns:
        The adapter; `str(adapter)` lists what was changed in Megatron-core.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: `strategy.head_chunk` is set, which Megatron's layers cannot follow; or an earlier `install()` had
            another strategy.
    """
    from burst_plugin.megatron.adapter import install_adapter

    return install_adapter(strategy)
