"""Layers with a state, computed on dense batches of independent pieces: in PyTorch alone, on any device."""
