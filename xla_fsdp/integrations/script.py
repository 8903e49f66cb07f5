"""The main function of a script, on one rank."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path


def run_script(rank: int, path: str, function: str, arguments: Sequence[str]) -> None:
    """Calls ``function`` of the file ``path``, without arguments, or with the rank if it takes one.

    Accelerate shards on XLA from then on, and so does the Trainer where transformers is there.

    Raises:
        AttributeError: the file has no such function.
    """
    import_integrations()
    script = Path(path)
    sys.argv = [path, *arguments]
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    called = getattr(module, function, None)
    if called is None:
        raise AttributeError(
            f"{path} has no function {function!r} to call on every rank: name the one that trains "
            "as main_training_function in the config file"
        )
    called(*([rank] if inspect.signature(called).parameters else []))


def import_integrations() -> None:
    """Of what is installed; before ranks start, where these are threads, in which transformers is
    not safely imported."""
    importlib.import_module("xla_fsdp.integrations.accelerate")
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("xla_fsdp.integrations.transformers")
