"""``xla_fsdp.tune``: the fastest settings for a training step on a TPU slice, without a TPU.

In the order of the data: ``settings`` (the settings and how they are applied to a model and its
repeated ``blocks``) → ``facts`` (sizes and times measured on a traced step) → ``estimate`` (time
and memory of a step with other settings) → ``space`` (the candidates) → ``search`` (chooses the
candidates to compile, and finds changes with which one would fit) → ``tuning`` (the result and its
table).
"""
