"""Compiled programs on disk, for :mod:`xla_fsdp.compiled.cache`.

``loading`` lets torch_xla read them back; ``store`` keeps them, in ``files`` whose names tell what
must be in them; ``kind`` says which may run in each other's place.
"""
