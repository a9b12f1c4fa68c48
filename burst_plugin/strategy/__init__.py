"""The options of a run, and published systems as options of it."""

from burst_plugin.strategy.options import PLANNED, MeasuredStrategy, Strategy
from burst_plugin.strategy.validation import AUTO

__all__ = ["AUTO", "PLANNED", "MeasuredStrategy", "Strategy"]
