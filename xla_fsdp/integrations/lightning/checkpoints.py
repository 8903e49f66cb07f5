"""Checkpoints of both strategies: one file of full tensors, or a folder of all ranks' shards.

A folder has models and optimizers in this package's format, and all else (loops, callbacks,
schedulers, hyperparameters) as bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.full_state import (
    full_optim_state_dict,
    full_state_dict,
    load_full_optim_state_dict,
    load_full_state_dict,
)
from ...checkpoint.loading import load_checkpoint
from ...checkpoint.rank_exchange import RankExchange
from ...collectives.random_state import synced_device
from ...consolidate.format import values
from ...consolidate.format.manifest import NAME
from ...consolidate.format.reader import ShardedCheckpoint
from ...consolidate.format.store import join
from ...sharding.state import is_sharded
from ..full_weights import with_full_tensors
from ..optimizers import load_joined, save_alone
from .ranks import to_host
from .wrap_settings import WrapSettings

# The key of a checkpoint that was read from a folder: its value is the folder.
_FOLDER = "xla_fsdp_folder"


class TrainerCheckpoints:
    settings: WrapSettings
    checkpoint_io: Any
    model: Any
    optimizers: Any
    lightning_module: Any
    # The model state of a checkpoint that was loaded before the setup, and ``strict``.
    _restored: tuple[Mapping[str, Any], bool] | None = None
    _is_set_up = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state on the first rank; empty if each rank writes its shards."""
        return {} if self.settings.saves_shards else full_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer state by parameter names; an unsharded optimizer uses only their order."""
        if self.settings.saves_shards:
            return {}
        return full_optim_state_dict(self.model, getattr(optimizer, "optimizer", optimizer))

    @synced_device()
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Saves ``checkpoint``, which the Trainer has collected; every rank calls it."""
        _require_kind(self, os.fspath(filepath))
        if not self.settings.saves_shards:
            _write_on_first_rank(self, checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ValueError("storage_options has no effect on sharded checkpoints: leave it out")
        rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        save_alone(
            os.fspath(filepath),
            self.model,
            self.optimizers if "optimizer_states" in checkpoint else (),
            step=checkpoint["global_step"],
            extra={"lightning": _packed(rest)},
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """No collective here: the caller holds a lock that only one rank can have."""
        wanted = os.fspath(checkpoint_path)
        if not get_filesystem(wanted).isdir(wanted):
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        wrong = (
            "was not saved by a Trainer, so it does not contain the progress of the training. "
            "Build the model and call xla_fsdp.load_checkpoint, or fit without ckpt_path"
        )
        folder, extra = _read_extra(wanted, "lightning", wrong, weights_only)
        return {**extra["lightning"], "state_dict": {}, _FOLDER: folder}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Before the setup only stores the state; the setup loads it once the model is sharded."""
        if not self._is_set_up:
            self._restored = checkpoint, strict
        elif _FOLDER in checkpoint:
            load_checkpoint(checkpoint[_FOLDER], self.model, strict=strict, restore_rng=False)
        else:
            load_full_state_dict(self.model, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the state of {len(states)} optimizers, but "
                f"configure_optimizers returned {len(self.optimizers)}. Return the same number of "
                "optimizers"
            )
        if states and _FOLDER in checkpoint:
            strict = self.lightning_module.strict_loading
            options = {"strict": strict, "restore_rng": False, "weights": False}
            load_joined(checkpoint[_FOLDER], self.model, self.optimizers, **options)
            return
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_full_optim_state_dict(self.model, optimizer, state)


class FabricCheckpoints:
    settings: WrapSettings
    checkpoint_io: Any
    broadcast: Any
    _convert_stateful_objects_in_state: Any
    modules: list[nn.Module]  # those that were set up

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state; of a sharded module on the first rank only."""
        return full_state_dict(module) if is_sharded(module) else module.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        if is_sharded(module):
            load_full_state_dict(module, state_dict, strict=strict)
        else:
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full_optim_state_dict(self._model_with(optimizer), optimizer)

    @synced_device()
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves a checkpoint; every rank calls it. Raises ValueError for filters or storage options
        with a sharded checkpoint, or if there is a file instead of a folder, or the reverse."""
        filters, wanted = filter or {}, self.broadcast(os.fspath(path))
        _require_kind(self, wanted)
        models, optimizers, rest = _sorted(state)
        content = rest if self.settings.saves_shards else state
        converted = self._convert_stateful_objects_in_state(content, filters)
        if not self.settings.saves_shards:
            _write_on_first_rank(self, converted, wanted, storage_options)
            return
        filtered = [key for key in filters if key in models or key in optimizers]
        if filtered or storage_options is not None:
            raise ValueError(
                f"{'filter for ' + ', '.join(filtered) if filtered else 'storage_options'} is not "
                "supported for sharded checkpoints. Leave it out, or use state_dict_type='full'"
            )
        save_alone(
            wanted,
            _model_of(models, wanted),
            list(optimizers.values()),
            step=0,
            extra={"fabric": _packed(converted), "optimizers": list(optimizers)},
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; every rank calls it. Returns the entries that are not in ``state``.
        Raises KeyError for keys that it lacks, if ``strict``; ValueError for a sharded checkpoint
        without a model to load into."""
        wanted = self.broadcast(os.fspath(path))
        if get_filesystem(wanted).isdir(wanted):
            return self._load_folder(wanted, state, strict, weights_only)
        found = self.checkpoint_io.load_checkpoint(wanted, weights_only=weights_only)
        if not state:
            return found
        if isinstance(state, (nn.Module, Optimizer)):
            self._load_into(state, found, strict)
            return {}
        _validate_keys_for_strict_loading(state.keys(), found.keys(), strict=strict)
        # Models first: an optimizer's state may refer to parameters that a model loads.
        models, optimizers, rest = _sorted(state)
        self._restore([*models, *optimizers, *rest], state, found, strict)
        return found

    def _load_folder(
        self, path: str, state: Any, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        if not isinstance(state, dict):
            raise ValueError(
                f"{path} is a sharded checkpoint, which needs a model to load into. Call "
                "fabric.load(path, {'model': model, ...}) with the keys that were saved, or "
                "convert it to one file with python -m xla_fsdp.consolidate"
            )
        models, optimizers, rest = _sorted(state)
        wrong = "was not saved by fabric.save. Load it with xla_fsdp.load_checkpoint"
        folder, extra = _read_extra(path, "fabric", wrong, weights_only)
        saved = extra["fabric"]
        _validate_keys_for_strict_loading(rest, saved.keys(), strict=strict)
        if optimizers and list(optimizers) != extra["optimizers"]:
            raise KeyError(
                f"{folder} has the optimizers {extra['optimizers']}, in this order, but the state "
                f"to load into has {list(optimizers)}. Pass the same optimizers, or none"
            )
        options = {"strict": strict, "restore_rng": False}
        load_joined(folder, _model_of(models, path), list(optimizers.values()), **options)
        self._restore(list(rest), state, saved, strict)
        return saved

    def _restore(
        self, keys: list[str], state: dict[str, Any], saved: dict[str, Any], strict: bool
    ) -> None:
        for key in keys:
            if key in saved and isinstance(state[key], _Stateful):
                self._load_into(state[key], saved.pop(key), strict)
            elif key in saved:
                state[key] = saved.pop(key)

    def _load_into(self, obj: Any, state: Any, strict: bool) -> None:
        if isinstance(obj, nn.Module):
            self.load_module_state_dict(obj, state, strict)
        elif isinstance(obj, Optimizer):
            load_full_optim_state_dict(self._model_with(obj), obj, state)
        else:
            obj.load_state_dict(state)

    def _model_with(self, optimizer: Optimizer) -> nn.Module:
        """The module that was set up and has the parameters of ``optimizer``."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [one for one in self.modules if wanted.intersection(map(id, one.parameters()))]
        if not found:
            raise ValueError(
                f"this {type(optimizer).__name__} has no parameter of a model that was set up. "
                "Call fabric.setup with its model"
            )
        return found[0] if len(found) == 1 else nn.ModuleList(found)


def _require_kind(strategy: Any, path: str) -> None:
    """Raises ValueError on every rank if ``path`` is a file instead of a folder, or the reverse."""
    folder = strategy.settings.saves_shards

    def look() -> None:
        files = get_filesystem(path)
        if files.exists(path) and files.isdir(path) != folder:
            raise ValueError(
                f"{path} is a {'file' if folder else 'folder'}, but with state_dict_type="
                f"{'sharded' if folder else 'full'!r} a checkpoint is a "
                f"{'folder' if folder else 'file'}. Remove it, or save to another path"
            )

    RankExchange().run_on_first_rank(f"save to {path}", look)


def _write_on_first_rank(
    strategy: Any, content: dict[str, Any], path: Any, storage_options: Any
) -> None:
    content = with_full_tensors(content)

    def write() -> None:
        strategy.checkpoint_io.save_checkpoint(
            to_host(content), path, storage_options=storage_options
        )

    RankExchange().run_on_first_rank(f"write {path}", write)


def _read_extra(
    path: str, key: str, wrong: str, weights_only: bool | None
) -> tuple[str, dict[str, Any]]:
    """The folder of the checkpoint at ``path``, and its ``extra``, in which ``key`` is unpacked.
    Not a collective. Raises ValueError, with ``wrong``, if it has no ``key``."""
    found = ShardedCheckpoint(path)
    whole, last = path.rstrip("/") or "/", found.folder.rpartition("/")[2]
    folder = whole if whole.rpartition("/")[2] == last else f"{whole}/{last}"
    extra = values.decode(found.manifest.extra, join(folder, NAME))
    if not isinstance(extra, dict) or key not in extra:
        raise ValueError(f"{folder} {wrong}")
    packed = io.BytesIO(extra[key])
    return folder, extra | {key: torch.load(packed, "cpu", weights_only=weights_only)}


def _packed(rest: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(to_host(with_full_tensors(rest)), buffer)
    return buffer.getvalue()


def _sorted(
    state: dict[str, Any],
) -> tuple[dict[str, nn.Module], dict[str, Optimizer], dict[str, Any]]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    rest = {key: v for key, v in state.items() if key not in models and key not in optimizers}
    return models, optimizers, rest


def _model_of(models: dict[str, nn.Module], path: str) -> nn.Module:
    if not models:
        raise ValueError(
            f"{path}: the state has no model, which a sharded checkpoint needs. Pass for example "
            "{'model': model, 'optimizer': optimizer}"
        )
    return next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(models)
