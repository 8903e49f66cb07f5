"""What scripts that launch ranks begin with."""

HEAD = """
import os, signal, sys, threading, time, torch, torch_xla
import torch_xla.core.xla_model as xm
import xla_fsdp
from xla_fsdp import CollectiveMismatchError, RankError, RankTimeoutError, launch

def raises(error, words, *step, **how):
    try:
        launch(*step, **how)
    except error as found:
        assert all(word in str(found) for word in words), found
        return found
    raise AssertionError((step, how))
"""

# Calls ``before()`` before the program of rank 1 starts.
LATE = """
dispatch = torch_xla._XLAC._xla_step_marker

def late(device, *args, **kwargs):
    if device == "xla:1":
        before()
    dispatch(device, *args, **kwargs)

torch_xla._XLAC._xla_step_marker = late
"""
