"""Layers of Megatron on a ring: their core attention, and its masks."""
