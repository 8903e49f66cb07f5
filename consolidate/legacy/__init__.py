"""Per-rank torch files (version 1, and the in-tree class's), as a source. Torch only.

From the bottom up: ``layout`` (how shards make up parameters), ``native`` and ``intree`` (metadata
to that), ``ranks`` (one complete, consistent set of them), ``files`` (torch files), ``optimizer``
(whose its numbered state is), ``source``.
"""
