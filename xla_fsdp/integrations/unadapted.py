"""Methods of sharded models raise where the installed release of their library lacks a name that
the integration uses: the integration changes nothing then, so they would use one rank's shards."""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

from ..sharding.state import is_sharded
from .changes import Changes, MissingNamesError

# A module that is imported whenever a model of the library exists: the changes, the modules that
# define the methods, and the methods. Classes are not named: a name may be what is missing.
_LIBRARIES = {
    "transformers.modeling_utils": (
        Changes("transformers"),
        ("transformers.modeling_utils", "transformers.generation.utils"),
        "save_pretrained push_to_hub generate num_parameters resize_token_embeddings".split(),
    ),
    "peft.peft_model": (
        Changes("peft"),
        ("peft.peft_model", "peft.tuners.tuners_utils"),
        "save_pretrained load_adapter merge_adapter merge_and_unload unload inject_adapter".split(),
    ),
}


def raise_in_methods(library: str, error: ImportError) -> None:
    """Makes the methods of ``library`` raise RuntimeError for sharded models, with ``error``."""
    changes, modules, names = _LIBRARIES[library]
    if changes.applied:
        return
    for module in filter(None, map(sys.modules.get, modules)):
        for owner in vars(module).values():
            if isinstance(owner, type) and owner.__module__ == module.__name__:
                for name in vars(owner).keys() & names:
                    refuse = functools.partial(_raise, name, remedy_of(error))
                    changes.around(owner, name, is_sharded)(refuse)
    changes.apply()


def remedy_of(error: ImportError) -> str:
    if isinstance(error, MissingNamesError):
        return str(error)
    return f"{error}: pip install 'xla_fsdp[hf]' installs a release that works"


def _raise(
    name: str, reason: str, original: Any, model: Any, *args: Any, **kwargs: Any
) -> NoReturn:
    raise RuntimeError(
        f"{name} of {type(model).__name__} would use the shards of this rank, because models of "
        f"this library could not be adapted. {reason}. Until then, "
        "xla_fsdp.full_state_dict(model) returns the weights"
    )
