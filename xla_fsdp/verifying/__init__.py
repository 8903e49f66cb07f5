"""Tests and measures this package on a machine: ``xla_fsdp.verify()``.

On the command line: ``python -m xla_fsdp.preflight --measure``.

The modules in the order of the data: ``api`` starts ``child`` processes, which launch ranks. Each
rank runs the ``stages``: ``parity`` (on ``nets``), ``microbenchmarks``, ``steps``. Rank 0 writes
the results (``records``) into a folder, from which ``verdict`` creates findings, a calibration and
the ``report``. ``privacy`` removes private data from it.
"""
