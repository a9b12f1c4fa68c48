"""How bytes move: transports, process groups, buffers, and how ranks agree and watch each other."""
