"""Plans for training a whole model: its memory, the time of a step, and which options to switch on."""
