"""The handling of kernels' results: rows of tiles, merging of partial attention, accumulation."""
