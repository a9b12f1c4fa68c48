"""Schedules as pure data, without tensors: the block that a rank works on at each step, and its link."""
