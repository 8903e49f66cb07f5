"""Does it do here what it says? ``xla_fsdp.verify()``, ``python -m xla_fsdp.preflight --measure``.

In the order of the data: ``api`` starts ``child`` processes, which launch ranks; each rank goes
through the ``stages``: ``parity`` (on ``nets``), ``microbenchmarks``, ``steps``; what rank 0 found
(``records``) lies in a folder, from which ``verdict`` makes findings, a calibration and the
``report``. ``privacy`` takes out what is nobody's business.
"""
