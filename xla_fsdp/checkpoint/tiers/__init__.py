"""Checkpoints in the memory of the hosts, beside those in the durable store.

``holding``: what one host's folder holds, and writes. ``hosts``: which hosts there are; they read
from each other, send each other copies, and a save is read wherever its files lie.
``checkpointer``: what users name, and which step is loaded.
"""
