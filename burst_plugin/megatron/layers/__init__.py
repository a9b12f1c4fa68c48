"""Layers of Megatron on a ring: which core attention they get, and what it attends to."""
