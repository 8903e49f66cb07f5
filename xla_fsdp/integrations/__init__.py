"""Integrations with other libraries. Importing the module of a library activates it.

Each declares what it changes in a library through
:class:`~xla_fsdp.integrations.changes.LibraryChanges`.
"""
