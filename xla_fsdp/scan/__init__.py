"""Equal blocks that are traced and compiled once, as one loop."""
