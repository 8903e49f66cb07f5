"""``xla_fsdp.plan``: memory and time of a training step on a TPU slice, without a TPU.

In the order of the data: ``tracing`` (records the program of a step) → ``compiling`` (runs the TPU
compiler in a separate process) → ``program`` (parses the compiled program) → ``timing`` (models the
time on the chips and links of ``tpu``) → ``reporting``. ``records`` has the data classes that these
share. ``make_report`` builds the report from the compiler's result, for both entry points: ``api``
and ``foreign``. ``recorded`` reads a recorded trace, to compare it with a plan.
"""
