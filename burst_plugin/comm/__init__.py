"""How bytes move: transports, process groups, buffers, and how ranks compare calls and watch each other."""
