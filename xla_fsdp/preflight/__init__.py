"""Is a TPU pod fit to train on? ``python -m xla_fsdp.preflight --tpu NAME``.

In the order of the data: ``where`` (node, zone, project) → ``api`` (asks the TPU API) →
``node`` (what it said) → ``node_checks`` → ``running`` and ``workers`` (send ``probe`` to every
worker) → ``worker_checks``, ``versions``, ``shared_path`` → ``checks`` (a line each).

Needs neither torch nor torch_xla here, so that it runs on a laptop.
"""
