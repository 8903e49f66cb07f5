"""Checkpoints in the memory of the hosts, beside those in the durable store.

``holding``: what one host's folder holds, and writes. ``wire``: hosts read from each other and send
each other copies. ``hosts``: which there are. ``choosing``: which step all hosts together have whole. ``spread``: that step as
a store to read, wherever its files lie. ``checkpointer``: what users name.
"""
