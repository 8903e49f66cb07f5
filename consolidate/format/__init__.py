"""Reads and writes the checkpoint format, defined in ``consolidate/README.md``. Needs torch only.

In order of dependency: ``store`` (files), ``strict`` and ``values`` (JSON), ``container``
(safetensors), ``digests``, ``rank_file`` (the tensors of one rank), ``manifest`` (the description
of a checkpoint), ``folders`` (several checkpoints in a folder), ``reader``.
"""
