"""Optimizers that need more of a parameter than an element at a time, on shards.

docs/how-to/optimizers.md has a table of what each sends and keeps.
"""

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
