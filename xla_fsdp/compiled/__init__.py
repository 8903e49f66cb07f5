"""What a host tells the compiler, and compiled programs on disk.

``cache`` keeps programs in files that are checked before use, and lets torch_xla read them.
"""
