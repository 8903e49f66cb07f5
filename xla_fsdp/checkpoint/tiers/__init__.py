"""Checkpoints in the memory of the hosts, beside those in the durable store.

``holding``: what one host's folder holds, and writes. ``hosts``: which hosts there are. ``wire``:
they read from each other and send each other copies. ``choosing``: which step all of them together
have whole. ``spread``: that step as a store to read, wherever its files lie. ``checkpointer``: what
users name.
"""
