"""When which block is where, and over which link it goes there: pure data, checked without a tensor."""
