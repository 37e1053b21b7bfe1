"""Products with quantised matrices, which are read as they are stored."""
