"""Per-rank torch files (version 1, and the in-tree class's), as a source. Torch only.

From the bottom up: ``layout`` (how shards make up parameters, by metadata), ``ranks`` (a complete
and consistent set of them), ``files`` (torch files), ``source``.
"""
