"""Is a TPU pod fit to train on? ``python -m xla_fsdp.preflight --tpu NAME``.

In the order of the data: ``where`` (node, zone, project) → ``api`` (asks the TPU API) →
``node`` (what it said, checked) → ``workers`` (sends ``probe`` to every worker) →
``worker_checks`` → ``checks`` (a line each). ``__main__`` runs them in this order.

Needs neither torch nor torch_xla here, so that it runs on a laptop.
"""
