"""Traces that ``xla_fsdp.profile`` recorded, in terms of a plan.

``xspace`` reads the file, ``trace`` what it says of the programs that ran, and finds the
step in it: which instruction ran when, of which module, phase and kind.
"""
