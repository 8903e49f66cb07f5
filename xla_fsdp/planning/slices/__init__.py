"""TPU slices: chips, links, and how long things take on them."""
