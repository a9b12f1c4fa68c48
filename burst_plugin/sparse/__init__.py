"""Sparse attention over the ranks of a ring: which keys each query attends to, chosen by their scores."""

from __future__ import annotations

from burst_plugin.sparse.blocks import keys_of_blocks as keys_of_blocks
from burst_plugin.sparse.blocks import select_blocks as select_blocks
from burst_plugin.sparse.cached_selection import select_cached as select_cached
from burst_plugin.sparse.cached_selection import select_cached_blocks as select_cached_blocks
from burst_plugin.sparse.compressed import Entries as Entries
from burst_plugin.sparse.index_loss import Teacher as Teacher
from burst_plugin.sparse.index_loss import indexer_loss as indexer_loss
from burst_plugin.sparse.pools import keys_of_pools as keys_of_pools
from burst_plugin.sparse.pools import pool as pool
from burst_plugin.sparse.pools import select_pools as select_pools
from burst_plugin.sparse.selection import Indexed as Indexed
from burst_plugin.sparse.selection import select_keys as select_keys
