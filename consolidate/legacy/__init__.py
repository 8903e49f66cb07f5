"""Reads per-rank torch files of version 1, and of torch_xla's in-tree FSDP class. Needs torch only.

In order of dependency: ``layout`` (maps shards to parameters, by metadata), ``ranks`` (checks that
the ranks are complete and consistent), ``files`` (torch files), ``source``.
"""
