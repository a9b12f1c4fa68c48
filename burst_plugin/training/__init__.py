"""Plans the training of a whole model: its memory, the time of a step, and what to switch on."""
