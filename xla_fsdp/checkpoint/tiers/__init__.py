"""Saves checkpoints in host memory, and some of them also in a durable store.

``host_tier`` reads and writes the folder of one host. ``hosts`` lets hosts read files from each
other and send copies, and reads a save whose files are on several hosts. ``checkpointer`` has the
public class, and chooses the step to load.
"""
