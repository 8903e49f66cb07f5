"""Memory and time of a training step on a TPU slice, without a TPU.

The data pass through ``tracing``, ``compiling``, ``program`` (parses the compiled program),
``timing`` and ``reporting``; ``records`` has the data classes that they share.
"""
