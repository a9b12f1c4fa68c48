"""Attention of queries to keys by their positions: layouts, masks, regions, tiles, required rows."""
