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
