"""``xla_fsdp.plan``: memory and time of a training step on a TPU slice, without a TPU.

In the order of the data: ``tracing`` (records the program of a step) → ``compiling`` (runs the TPU
compiler in a separate process) → ``program`` (parses the compiled program) → ``timing`` (models the
time) → ``reporting``. ``records`` has the data classes that they share; ``make_report`` builds the
report for ``api`` and ``foreign``; ``recorded`` reads a trace of a run to compare with a plan.
"""
