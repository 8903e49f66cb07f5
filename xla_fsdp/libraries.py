"""Libraries whose models need more than wrapping, and the part of this package that knows them.

A model of theirs has methods that read its parameters outside of a forward: ``save_pretrained``
would write this rank's shards as if they were weights. Nobody should have to know that, so the part
that mends it is imported with the first wrapper, and only where the library is in use. It stands
above the wrapper, which therefore knows its name and nothing else.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

from torch import nn

# A module that is imported wherever there is a model of the library: what to import then. It has
# ``adapt(model)``, which is called with every module that is being wrapped.
_PARTS = {
    "transformers.modeling_utils": "integrations.models",
    "peft.peft_model": "integrations.peft",
}


def adapt(module: nn.Module) -> None:
    """Has models of other libraries, and ``module`` if it is of one, work while sharded."""
    for library, home in _PARTS.items():
        if library not in sys.modules:
            continue
        try:
            part: Any = import_module(f".{home}", __package__)
        except ImportError as error:  # a release that nobody has looked at
            warnings.warn(
                f"{error}. Until then save_pretrained writes shards of wrapped models, and "
                "generate does not know of them: use full_state_dict",
                stacklevel=2,
            )
            continue
        part.adapt(module)
