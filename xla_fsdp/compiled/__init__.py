"""The compiler's options on a host, and compiled programs on disk.

``cache`` stores programs in files that are checked before use, and lets torch_xla load them.
"""
