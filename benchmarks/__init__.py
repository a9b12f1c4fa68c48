"""Measurements of burst_plugin and of other libraries for context parallelism."""
