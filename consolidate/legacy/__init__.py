"""Reads per-rank torch files of version 1, and of torch_xla's in-tree FSDP class."""
