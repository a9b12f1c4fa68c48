"""What is done with what a kernel returns: tiles, merging, accumulation."""
