"""Does it do here what it says? ``xla_fsdp.verify()``, ``python -m xla_fsdp.preflight --measure``.

In the order of the data: ``api`` starts ``child`` processes, which launch ranks; each rank goes
through the ``stages``: ``parity`` (on ``nets``), ``saving``, ``rates`` and ``collectives``,
``steps``; what rank 0 found (``records``) lies in a folder, from which ``verdict`` makes findings,
``fitting`` a calibration, and ``report`` (``tables``, ``pictures``, ``page``) what is read.
``privacy`` takes out what is nobody's business.
"""
