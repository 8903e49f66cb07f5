"""Side by side with the in-tree class: ``python -m benchmarks.compare``."""
