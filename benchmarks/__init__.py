"""Measurements of burst_plugin and of other libraries for context parallelism."""


class RefusedError(Exception):
    """Raised for what cannot be done on this machine; the text tells the user what to change."""
