"""Equal blocks, traced and compiled once, in one loop."""
