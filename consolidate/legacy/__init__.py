"""Reads per-rank torch files of version 1, and of torch_xla's in-tree FSDP class. Needs torch only.

``ranks`` maps shards to parameters, and checks that the ranks are complete and consistent;
``source`` reads them from torch files.
"""
