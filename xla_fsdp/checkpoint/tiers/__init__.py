"""Saves checkpoints in host memory, and some of them also in a durable store."""
