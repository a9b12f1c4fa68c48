"""Prices of schedules on a cluster that is described by its links, without running them: time, bytes and buffers."""
