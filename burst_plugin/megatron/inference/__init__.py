"""Megatron's static inference (`StaticInferenceContext`) on a ring."""

from __future__ import annotations

from burst_plugin.megatron.inference.static_context import cache_of

__all__ = ["cache_of"]
