"""Which tokens meet: layouts, masks, regions, tiles, required rows."""
