"""Libraries that people start from, each of which uses this package once its module is imported.

``import xla_fsdp.integrations.accelerate`` and ``import xla_fsdp.integrations.transformers``. What
they change in another library is stated in one place each, through
:class:`~xla_fsdp.integrations.changes.Changes`, and can be undone.
"""
