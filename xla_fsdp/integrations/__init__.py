"""Integrations with other libraries. Importing the module of a library activates it.

``import xla_fsdp.integrations.accelerate`` and ``import xla_fsdp.integrations.transformers``. Each
module declares what it changes in the other library through
:class:`~xla_fsdp.integrations.changes.Changes`. The changes can be undone.
"""
