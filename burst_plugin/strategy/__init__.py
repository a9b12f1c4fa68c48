"""The options of a run, and published systems as options of it."""

from burst_plugin.strategy.options import AUTO, PLANNED, MeasuredStrategy, Strategy

__all__ = ["AUTO", "PLANNED", "MeasuredStrategy", "Strategy"]
