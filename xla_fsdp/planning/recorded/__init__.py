"""Read traces that ``xla_fsdp.profile`` recorded, to compare them with a plan.

``xspace`` reads the file. ``trace`` reads the programs in it and finds one step: when each
instruction ran, and its module, phase and kind.
"""
