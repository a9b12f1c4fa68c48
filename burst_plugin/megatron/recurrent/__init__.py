"""Mixers of Megatron that carry a state along the sequence, Mamba-2 and gated delta net, on the ring."""
