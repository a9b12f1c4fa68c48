"""Whether a cluster is right, safe and fast with this package, and what suits it: the sections of `burst check`."""
