"""``xla_fsdp.tune``: the fastest settings for a training step on a TPU slice, without a TPU.

In the order of the data: ``settings`` (applied to a model and its ``blocks``) → ``facts`` (sizes
and times of a traced step) → ``estimate`` (time and memory with other settings) → ``space`` (the
candidates) → ``search`` (chooses the candidates to compile) → ``tuning`` (the result).
"""
