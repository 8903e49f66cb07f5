"""Optimizers whose update is not elementwise: docs/how-to/optimizers.md."""

from .adafactor import Adafactor
from .adam8bit import AdamW8bit
from .in_float32 import MasterWeights
from .layerwise import LAMB, LARS
from .muon import Muon, split_matrices
from .stochastic import StochasticRounding

__all__ = [
    "LAMB",
    "LARS",
    "Adafactor",
    "AdamW8bit",
    "MasterWeights",
    "Muon",
    "StochasticRounding",
    "split_matrices",
]
