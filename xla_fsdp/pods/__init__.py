"""Before, while and after a run on a pod.

* ``python -m xla_fsdp.preflight --tpu NAME`` (``command_line``) checks whether a pod is ready:
  ``tpu_api`` queries the TPU API, ``node`` checks its answer, ``workers`` sends ``probe`` to every
  worker, ``worker_checks`` checks the answers. All this imports neither torch nor torch_xla.
* ``xla_fsdp.verify()``, on the command line ``--measure``, tests and measures a machine: ``verify``
  starts processes whose ranks run ``stages`` (``parity``, ``microbenchmarks``, ``steps``).
  ``verdict`` compares their ``records`` with the expected ones, for the ``report``.
* ``preemption``, ``divergence`` and ``profiling`` are for the training loop.

A result of a check is a ``Finding`` (``findings``); ``commands`` runs other programs.
"""
