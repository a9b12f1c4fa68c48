"""Batches of Megatron, cut over context-parallel ranks: layouts, packed documents, what loaders hand over."""
