"""What a schedule takes on a cluster that is described, without running it."""
