"""Faults of Megatron under context parallelism, repaired at run time."""
