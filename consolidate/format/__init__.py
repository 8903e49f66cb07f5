"""The sharded checkpoint as it lies on disk; stated in the README of consolidate. Torch only.

From the bottom up: ``store`` (where bytes live), ``strict`` and ``values`` (JSON), ``container``
(safetensors), ``digests``, ``rank_file`` (one rank's tensors), ``manifest`` (what makes a folder a
checkpoint), ``folders`` (many of them), ``reader``.
"""
