"""Models that take images, video and audio, on shards of their batches."""
