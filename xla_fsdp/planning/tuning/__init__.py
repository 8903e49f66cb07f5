"""The settings that train a model fastest on a slice, found without one: ``xla_fsdp.tune``.

In the order of the data: ``settings`` (what is searched, and applied to a model, whose repeated
``blocks`` it finds) → ``facts`` (of a step that was traced, not compiled) → ``estimate``
(what a step with other settings takes and needs) → ``space`` (what is worth a look) → ``search``
(which of it the compiler is asked) → ``tuning`` (the answer, with its table; ``remedies``: what
would make fit what does not).
"""
