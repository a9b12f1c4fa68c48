"""Batches of Megatron, cut over context-parallel ranks: layouts, documents, packed sequences, order of samples."""
