"""Traces a training step without running it."""
