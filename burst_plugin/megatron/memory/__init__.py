"""Memory beside attention in models of Megatron: losses and MLPs in chunks, what waits on the host."""
