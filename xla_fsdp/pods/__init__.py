"""Before, while and after a run on a pod.

* ``command_line`` (``python -m xla_fsdp.preflight``), ``tpu_api``, ``node``, ``workers``,
  ``probe``, ``worker_checks``: is a pod ready? These import neither torch nor torch_xla.
* ``verify`` and what it runs, ``stages`` to ``verification_report``: tests and measures a machine.
* ``preemption``, ``divergence``, ``profiling``: for the training loop.
"""
