"""Benchmarks, to be run from the repository: for example ``python -m benchmarks.compare``."""
