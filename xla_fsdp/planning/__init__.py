"""What a training step needs on a TPU slice, found out without one: ``xla_fsdp.plan``.

In the order of the data: ``tracing`` (a step becomes a program) → ``compiling`` (on the TPU
compiler, in a process of its own) → ``program`` (reads what came out) → ``slices`` (chips, links,
times) → ``reporting``. ``records`` is what they hand to each other.
"""
