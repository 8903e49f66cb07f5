"""Checks around every optimizer step, in hooks that the import of this module registers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import xlac
from ..moves import REPLACED
from ..ranks.rank import is_simulated_rank
from ..tree import map_tensors, tensors_in
from .deferred_values import require_initialized
from .gathering import UnshardedParameter
from .ignored import ignored_mark_of
from .layout import ShardSpec, spec_of
from .sharded_parameter import as_sharded, local
from .sharded_tensor import ShardedTensor, require_reduced, sharded_tensor_of, sharded_tensors_of
from .user_checks import WARNED

# Attributes of an optimizer. How many parameters it had when it was checked.
_CHECKED = "_xla_fsdp_parameters_checked"
# Its state was loaded by parameter name.
_BY_NAME = "_xla_fsdp_by_name"
# For each current step (a plan nests them) the groups that use ``foreach`` until it ends.
_CHOSEN = "_xla_fsdp_foreach"
# How many of its last steps have not run; None after the warning.
_PENDING = "_xla_fsdp_pending_steps"
# More than a script traces into one program on purpose.
_MANY = 8
# ``foreach`` is bit-identical and takes half the host time (benchmarks/LOG.md); not so for others.
_SAME = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adadelta, optim.Adamax)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.__dict__.get(_CHECKED) != len(every):
        _check_parameters(optimizer, every)
        require_initialized(every, f"{type(optimizer).__name__}.step() was called")
        _import_local_state(optimizer)
        optimizer.__dict__[_CHECKED] = len(every)
    require_reduced(every, f"{type(optimizer).__name__}.step()")
    _warn_without_sync(optimizer, every)
    for group in optimizer.param_groups:
        if group.get("fused") and any(p.device.type == "xla" for p in group["params"]):
            _unset_fused(optimizer, group)
    if type(optimizer) in _SAME:  # subclasses may override step
        chosen = [group for group in optimizer.param_groups if _supports_foreach(group)]
        for group in chosen:
            group["foreach"] = True
        optimizer.__dict__.setdefault(_CHOSEN, []).append(chosen)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # A saved state must contain the user's choice.
    begun = optimizer.__dict__.get(_CHOSEN)
    for group in begun.pop() if begun else ():
        group["foreach"] = None
    if is_simulated_rank():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sharded = sharded_tensor_of(parameter)
            if sharded is not None and sharded.copy is not None and parameter.grad is not None:
                # torch's fused kernels do not increase the version of what they change.
                torch.autograd.graph.increment_version(parameter)
                if sharded.copy.held is not None:  # streamed copies are sent by their wrapper
                    sharded.copy.send()


def state_is_by_name(optimizer: Optimizer) -> None:
    optimizer.__dict__[_BY_NAME] = True


def _check_parameters(optimizer: Optimizer, every: Sequence[Tensor]) -> None:
    """Warns about gradients that nothing averages, and makes the state's files plain.

    Raises RuntimeError if parameters were replaced, or their order differs.
    """
    kind, first = type(optimizer).__name__, _CHECKED not in optimizer.__dict__
    left = next((parameter for parameter in every if hasattr(parameter, REPLACED)), None)
    # If other code still uses the old parameters, they have gradients.
    if left is not None and all(parameter.grad is None for parameter in every):
        raise RuntimeError(
            f"this {kind} was made before module.to(device), which replaced "
            f"its parameters (one of shape {list(left.shape)} on {left.device}) by new ones on the "
            "device, so it would train nothing. Make the optimizer after moving and wrapping"
        )
    unreduced = []
    shards = False
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            where = f"parameter {place} of group {number} of this {kind}"
            if isinstance(parameter, UnshardedParameter):
                raise RuntimeError(
                    f"{where} is a full parameter of a forward or of unshard(), which is freed "
                    "afterwards. Make the optimizer from model.parameters() outside of both"
                )
            sharded = sharded_tensor_of(parameter)
            if sharded is None:
                if parameter.grad is not None:
                    unreduced.append((where, parameter))
                continue
            shards = True
            if sharded.shard is not parameter:
                raise RuntimeError(
                    f"{where} ({sharded.key!r} in its wrapper) was sharded after the optimizer "
                    "was made, so the optimizer refers to an empty tensor and would train "
                    "nothing. Make the optimizer after wrapping; parameters have the same names "
                    "then"
                )
            by_position = first and _BY_NAME not in optimizer.__dict__
            if sharded.reordered and by_position and optimizer.state.get(parameter):
                raise RuntimeError(
                    f"this {kind} has state of parameter {sharded.key!r} before its "
                    "first step, and the weights came from torch_xla's class, which "
                    "lists parameters in another order: load_state_dict, which goes by position, "
                    "gave parameters the state of others. Join the files by python -m "
                    "xla_fsdp.consolidate --optimizer, and load the result with "
                    "xla_fsdp.load_full_optim_state_dict: docs/how-to/migrate-from-torch-xla.md"
                )
    # Optimizers around another one may not call torch's constructor, and have none of its hooks.
    if shards and first and "_optimizer_state_dict_post_hooks" in optimizer.__dict__:
        optimizer.register_state_dict_post_hook(_with_local_state)
        optimizer.register_load_state_dict_post_hook(_import_local_state)
    if unreduced and xr.world_size() > 1:
        _warn_of_unreduced(unreduced, shards)


def _warn_of_unreduced(parameters: Sequence[tuple[str, Tensor]], shards: bool) -> None:
    """``shards``: others of the optimizer are sharded."""
    for where, parameter in parameters:
        note = ignored_mark_of(parameter)
        if note is not None and not note.averaged:
            warnings.warn(
                f"parameter {note.name!r} is ignored by its wrapper, so its gradient is of "
                "this rank's batch only, and the ranks' values will diverge. Call "
                "model.average_ignored_gradients() between backward and step; ignore this "
                "warning if all ranks see the same data or are meant to differ",
                stacklevel=2,
            )
            return
        alone = shards and note is None and parameter.device.type == "xla"
        if alone and not getattr(parameter, WARNED, False):
            warnings.warn(
                f"{where}, of shape {list(parameter.shape)}, is in no wrapper, while others are "
                "sharded: its gradient is of this rank's batch only, and the ranks' values will "
                "diverge. Wrap the module that has it (replace layers before wrapping), or "
                "average its gradient manually",
                stacklevel=2,
            )
            return


def _warn_without_sync(optimizer: Optimizer, every: Sequence[Tensor]) -> None:
    pending = optimizer.__dict__.get(_PENDING, 0)
    if pending is None or is_simulated_rank():
        return
    on_device = (p for p in every if p.device.type == "xla" and sharded_tensor_of(p) is not None)
    trained = next((p for p in on_device if p.grad is not None), None)
    if trained is None:
        return
    pending = pending + 1 if xlac.are_pending([trained])[0] else 0
    optimizer.__dict__[_PENDING] = pending if pending < _MANY else None
    if pending == _MANY:
        warnings.warn(
            f"the last {_MANY} steps of {type(optimizer).__name__} were traced, but none of them "
            "has run: XLA runs what was traced at torch_xla.sync(), and a program of many steps "
            "takes ever longer to trace and to compile. Call torch_xla.sync() after every "
            "optimizer.step()",
            stacklevel=2,
        )


def _first_shard(optimizer: Optimizer) -> ShardedTensor | None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next(sharded_tensors_of(parameters), None)


def has_shards(optimizer: Optimizer) -> bool:
    return _first_shard(optimizer) is not None


def _with_local_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with plain tensors, which files contain."""
    return {**state_dict, "state": map_tensors(local, state_dict["state"])}


def _import_local_state(optimizer: Optimizer) -> None:
    """Makes plain tensors in the state that have a shard's shape shards.

    Those of the full parameter's shape too on one rank; on several ranks raises RuntimeError.
    """
    kind = type(optimizer).__name__
    for parameter, state in optimizer.state.items():
        spec = spec_of(parameter)
        if spec is not None:
            shard_of = functools.partial(_shard_of_state, kind=kind, spec=spec)
            optimizer.state[parameter] = map_tensors(shard_of, state)


def _shard_of_state(value: Tensor, kind: str, spec: ShardSpec) -> Tensor:
    if tuple(value.shape) == tuple(spec.local_shape):
        return as_sharded(value, spec)
    if type(value) is not Tensor or value.numel() <= 1 or value.shape != spec.shape:
        return value
    if spec.world.size > 1:
        raise RuntimeError(
            f"this {kind} has state of the shape of the full parameter {spec.name!r}, "
            f"{list(spec.shape)}, but each rank has a shard of it. Load it with "
            "xla_fsdp.load_full_optim_state_dict(model, optimizer, state). If the optimizer itself "
            "has made it, wrap with sharding_strategy=NO_SHARD"
        )
    return as_sharded(spec.cut(value), spec)


def _unset_fused(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Makes a group with ``fused=True`` on XLA use the default algorithm, and warns.

    Raises RuntimeError if gradients are scaled, which only a fused kernel undoes.
    """
    if hasattr(optimizer, "found_inf"):  # as torch's gradient scaler sets it
        raise RuntimeError(
            f"{type(optimizer).__name__} with fused=True cannot unscale gradients on XLA, which "
            "has no fused kernels. Make the optimizer without fused=True"
        )
    group["fused"] = group["foreach"] = None
    optimizer.__dict__["_step_supports_amp_scaling"] = False
    warnings.warn(
        "an optimizer was made with fused=True, for which XLA has no kernels: the step takes the "
        "default algorithm, and the compiler fuses it. Leave fused out",
        stacklevel=2,
    )


def _supports_foreach(group: dict[str, Any]) -> bool:
    """Whether torch's ``foreach`` step gives the same result."""
    if group.get("foreach", False) is not None:
        return False
    if group.get("fused") or group.get("capturable") or group.get("differentiable"):
        return False
    # ``foreach`` supports no learning rates that are tensors.
    for name, value in group.items():
        if name != "params" and tensors_in(value):
            return False
    # ``foreach`` operators raise for gradients in another dtype than their parameter.
    return all(
        p.device.type == "xla"
        and sharded_tensor_of(p) is not None
        and (p.grad is None or p.grad.dtype is p.dtype)
        for p in group["params"]
    )


def _checked(function: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        if xr.world_size() > 1:
            check(given)
        return function(given, *args, **kwargs)

    return checked


def _require_no_shards(optimizer: Optimizer) -> None:
    sharded = _first_shard(optimizer)
    if sharded is not None:
        raise RuntimeError(
            "xm.reduce_gradients (part of xm.optimizer_step, and called by Accelerate's optimizer "
            "without xla_fsdp.integrations.accelerate) averages gradients over the ranks a second "
            f"time, but they are of different shards, such as that of {sharded.key!r}. Leave it "
            "out: call optimizer.step(), and torch_xla.sync() after it; with Accelerate, import "
            "xla_fsdp.integrations.accelerate (with the Trainer "
            "xla_fsdp.integrations.transformers) at the top of the script"
        )


def _require_not_divided(model: nn.Module) -> None:
    for sharded in sharded_tensors_of(model.parameters()):
        if sharded.world is not None and sharded.world.size > 1:
            raise RuntimeError(
                "xm.broadcast_master_param would replace every rank's shards, such as that of "
                f"{sharded.key!r}, by those of the first rank. Call it before wrapping, or wrap "
                "with sync_module_states=True"
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
xlac.gradients_to_average.value = _checked(xlac.gradients_to_average.value, _require_no_shards)
vars(xm)["broadcast_master_param"] = _checked(xm.broadcast_master_param, _require_not_divided)
