"""Which rank works on which block at which step, and over which link it gets there: pure data, without tensors."""
