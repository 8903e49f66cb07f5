"""What a training step needs on a TPU slice, found out without one: ``xla_fsdp.plan``.

In the order of the data: ``tracing`` (a step becomes a program) → ``compiling`` (on the TPU
compiler, in a process of its own) → ``program`` (reads what came out) → ``timing`` (on the chips
and links of ``tpu``) → ``reporting``. ``records`` is what they hand to each other; ``make_report``
leads from the compiler's answer to the report, for both doors, ``api`` and ``foreign``.
``recorded`` reads what ran, for a report to stand beside it.
"""
