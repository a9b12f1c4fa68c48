"""Which tokens each rank holds, so that the work is even."""
