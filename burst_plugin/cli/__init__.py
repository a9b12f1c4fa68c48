"""The command `burst`, or `python -m burst_plugin.cli`."""

from burst_plugin.cli.main import main

__all__ = ["main"]
