"""Checks whether a TPU pod is ready for training: ``python -m xla_fsdp.preflight --tpu NAME``.

The modules in the order of the data: ``where`` (node, zone, project) → ``api`` (queries the TPU
API) → ``node`` (checks its answer) → ``workers`` (sends ``probe`` to every worker) →
``worker_checks`` → ``checks`` (one line for each). ``__main__`` runs them in this order.

This package imports neither torch nor torch_xla, so it runs on a laptop.
"""
