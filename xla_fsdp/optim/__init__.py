"""Optimizers that need more of a parameter than an element at a time, on shards.

docs/optimizers.md has a table of what each sends and keeps.
"""

from .adafactor import Adafactor
from .adam8bit import AdamW8bit
from .layerwise import LAMB, LARS
from .muon import Muon, split_matrices

__all__ = ["LAMB", "LARS", "Adafactor", "AdamW8bit", "Muon", "split_matrices"]
