"""Full (unsharded) state dicts of a sharded model and its optimizer: gathers and loads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import synced_device
from ..collectives.world import World
from ..consolidate.format import values
from ..consolidate.format.manifest import State
from ..optim.saved import LazyState, StateConverter, state_converter_of
from ..sharding.state import units_in
from ..sharding.user_checks import require_values
from ..tree import map_tensors, tensors_in
from .inventory import CPU, ParameterShard, agree_on_inventory, gather_members
from .matching import (
    LoadedKeys,
    Match,
    OptimizerMatch,
    OptimizerState,
    convert_numbers_to_names,
    match_model,
    match_optimizer,
)
from .optimizer_state import (
    OptimizerStateShard,
    agree_on_state,
    members_of_groups,
    options,
    unsharded_placeholder,
)
from .protocol import (
    PlaceholderTensor,
    capture_loaded_values,
    full_values,
    placeholder_state_dict,
    state_dict_of,
)
from .rank_exchange import RankExchange
from .readable_tensor import describe_value, sent_by_first_rank
from .value_loading import load_model_values, load_optimizer_values

T = TypeVar("T")


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """Returns what ``state_dict()`` of the unwrapped module returns. Call it on every rank.

    Overridden methods, hooks and extra state take effect; that code runs on the ranks that get the
    result, the others get ``{}``. Parameters have the dtype in which they are stored. Buffers have
    the dtype from before wrapping, and the values of the rank that returns them.

    In addition to the result, memory holds one full tensor (with ``flatten_parameters``, one vector
    of a wrapper). If a hook or method computes with values, it is called a second time, with all
    full parameters in memory.

    Args:
        rank0_only: only rank 0 gets the result. ``False``: every rank gets it, so a host has one
            copy in memory for each of its ranks.
        offload_to_cpu: tensors are on the CPU. ``False``: on the rank's XLA device.

    Raises:
        TypeError, ValueError: ``model`` is not a module, has parameters on the meta device, or is
            sharded over groups whose copies may differ.
        MetadataMismatchError: the ranks have different models.
    """
    return gather_state(model, lambda name: True, rank0_only, offload_to_cpu)


@synced_device()
def gather_state(
    model: nn.Module,
    wanted: Callable[[str], bool],
    rank0_only: bool,
    offload_to_cpu: bool,
    path: str = "",
) -> dict[str, Any]:
    """Returns the entries of :func:`full_state_dict` for whose name ``wanted`` is true.

    ``path``: name of a module in ``model``, whose state dict is returned. Other parameters are
    gathered only if a hook computes with values.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    require_values(units_in(model), "full_state_dict was called")
    to = _device_of_result(exchange, rank0_only, offload_to_cpu)
    parts = inventory.parts()
    number_of = {shard: number for number, members in enumerate(parts) for shard in members}

    def select(state: Mapping[str, Any] | None) -> dict[str, Any]:
        chosen = copy.copy(state) if isinstance(state, dict) else dict(state or {})
        for name in list(chosen):
            if not wanted(name):
                del chosen[name]
        return chosen

    def call_with_placeholders() -> tuple[dict[str, Any], list[int] | None]:
        """Returns also the parts to gather, ``None`` if ``state_dict()`` needs values."""
        if to is None:
            return {}, []
        found = placeholder_state_dict(model, inventory, path)
        state = select(found)
        sources = (one.source for one in tensors_in(state) if isinstance(one, PlaceholderTensor))
        numbers = sorted({number_of[one] for one in sources if isinstance(one, ParameterShard)})
        return state, None if found is None else numbers

    what = "call state_dict() of the unwrapped module"
    state, needed = exchange.run(what, call_with_placeholders)
    values: dict[Any, torch.Tensor] = {}
    if None in needed:
        values = full_values(inventory, to)
        state = exchange.run_on_each_rank(
            what, lambda: {} if to is None else select(state_dict_of(model, values, path))
        )
    else:
        for number in sorted(set().union(*needed)):
            members, mine = parts[number], number in needed[exchange.rank]
            values |= gather_members(members, members[0].holder, to if mine else None)

    def resolved(tensor: torch.Tensor) -> torch.Tensor:
        assert to is not None
        if not isinstance(tensor, PlaceholderTensor):
            return tensor.to(to)
        if tensor.source not in values:
            values[tensor.source] = tensor.source.copy_to(to)
        return values[tensor.source]

    def resolve() -> dict[str, Any]:
        for name, value in state.items():
            state[name] = map_tensors(resolved, value)
        return state

    return exchange.run_on_each_rank("gather the model state", resolve)


def _device_of_result(
    exchange: RankExchange, rank0_only: bool, offload_to_cpu: bool
) -> torch.device | None:
    if rank0_only and exchange.rank:
        return None
    return CPU if offload_to_cpu else torch_xla.device()


@synced_device()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> LoadedKeys:
    """Loads a full (unsharded) state dict into a sharded model. Call it on every rank.

    Overridden ``load_state_dict()`` methods and hooks of the unwrapped module run on the ranks that
    have the state dict, a second time with all full parameters in memory if they compute with
    parameters. If only rank 0 has it, the other ranks pass ``None`` and receive it in blocks of at
    most 16 MiB. Parameters stay the same objects, so optimizers remain valid. Everything is checked
    before anything is changed.

    Args:
        state_dict: for a tied parameter, one of its names is enough. Floating-point tensors are
            cast to the dtype of the parameter.
        strict: raise unless the names are those of the model. ``False`` loads those that match.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict`` returns them.

    Raises:
        ModelMismatchError: names, shapes or dtypes do not match the model.
        Exception: any exception that a hook raises.
        ValueError: ``state_dict`` is ``None`` on rank 0, or ``model`` cannot be loaded into (see
            :func:`full_state_dict`).
        UnsupportedValueError: rank 0 cannot send an extra state.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    label = "state_dict"

    offered = capture_loaded_values(
        exchange, model, inventory, label, f"match {label}", lambda: state_dict
    )

    def match(found: dict[str, Any]) -> Match:
        reported = LoadedKeys(*found["keys"])
        return match_model(inventory, found["values"], label, strict, reported=reported)

    given = offered and {"values": offered.values, "keys": list(offered.keys)}
    matched = match_given(exchange, label, given, dict, match)
    exchange.run_and_gather(f"load {label}", lambda: load_model_values(inventory, matched))
    return matched.keys


def match_given(
    exchange: RankExchange,
    label: str,
    given: Any,
    look: Callable[[Any], dict[str, Any]],
    match: Callable[[dict[str, Any]], T],
) -> T:
    """Matches ``given`` if every rank has it, or else the values that rank 0 sends.

    ``look`` converts ``given``, called ``label`` in messages, into the argument of ``match``.
    Raises ValueError if ``given`` is ``None`` on rank 0.
    """
    having = exchange.gather_values(f"who has {label}", given is not None)
    if not having[0]:
        raise ValueError(f"{label} is None on rank 0. Pass it on rank 0 or on every rank.")
    if all(having):
        return exchange.run_on_each_rank(f"match {label}", lambda: match(look(given)))

    def match_own() -> tuple[dict[str, Any] | None, Any]:
        if exchange.rank:
            return None, None
        looked = look(given)
        match(looked)
        return looked, describe_value(looked, label)

    looked, described = exchange.run(f"match {label}", match_own)
    return exchange.run_on_each_rank(
        f"match rank 0's {label}",
        lambda: match(sent_by_first_rank(World.current(), described[0], looked, label)),
    )


@synced_device()
def full_optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool = True,
    offload_to_cpu: bool = True,
) -> dict[str, Any]:
    """Returns the full (unsharded) optimizer state by parameter name. Call it on every rank.

    The result has the format of torch FSDP::

        {"state": {name: {key: value}}, "param_groups": [{option: value, "params": [name, ...]}]}

    A tied parameter appears under its first name. State of the parameter's shape is gathered, one
    tensor at a time; other state (``step``) of a flattened vector or of stacked blocks is copied
    for each of their parameters. Ranks that do not get the result get ``{}``.

    Optimizers of ``xla_fsdp.optim`` whose state has other shapes give that of the same optimizer on
    the unwrapped model (``Adafactor``: of ``torch.optim.Adafactor``). ``AdamW8bit`` encodes the
    full parameter again, in blocks (exact where blocks do not change).

    Args:
        rank0_only, offload_to_cpu: see :func:`full_state_dict`.

    Raises:
        UnsupportedValueError: a TypeError; a state has neither its parameter's shape nor is it one
            value that a checkpoint can store.
        ModelMismatchError: the optimizer has parameters that are not in the model.
        MetadataMismatchError: the optimizers of two ranks have different state.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    groups, state, tensors = agree_on_state(exchange, inventory, optimizer)
    to = _device_of_result(exchange, rank0_only, offload_to_cpu)
    converter = state_converter_of(optimizer)
    gathered_to = to if converter is None or to is None else CPU
    options_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    tensors_of: dict[nn.Parameter, list[OptimizerStateShard]] = {}
    for each in tensors:
        tensors_of.setdefault(each.parameters[0].holder, []).append(each)
    found: dict[str, dict[str, Any]] = {}
    for members in inventory.parts():
        holder = members[0].holder
        own = {
            shard: _decode_single(state[shard.name], gathered_to)
            for shard in members
            if shard.name in state
        }
        for one in tensors_of.get(holder, ()):
            having = [shard for shard in one.parameters if shard in own]
            if having:
                value = one.tensor.make() if isinstance(one.tensor, LazyState) else one.tensor
                full = gather_members(members, value, gathered_to)
                for shard in having if full else ():
                    own[shard][one.key] = full[shard]
        if to is not None and converter is not None:
            group = options_of.get(holder, {})
            own = {s: _convert(converter, s, saved, group, to) for s, saved in own.items()}
        found.update((shard.name, saved) for shard, saved in own.items())

    def describe_groups() -> list[dict[str, Any]]:
        return [
            {key: _detached(value) for key, value in options(group).items()}
            | {"params": [shard.name for shard in members]}
            for group, members in zip(optimizer.param_groups, groups, strict=True)
        ]

    described = exchange.run_on_each_rank("gather the optimizer state", describe_groups)
    if to is None:
        return {}
    order = [shard.name for shard in inventory.parameters if shard.name in found]
    return {"state": {name: found[name] for name in order}, "param_groups": described}


@synced_device()
def load_full_optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None,
) -> None:
    """Loads the full optimizer state of an unsharded model. Call it on every rank.

    If only rank 0 has the state, the other ranks pass ``None``. State keeps its dtype. A 0-d tensor
    such as ``step`` goes to the device of the optimizer's present value; without one, to the CPU,
    or to the XLA device with ``capturable`` or ``fused``. In a flattened vector, parameters without
    state get zeros.

    Args:
        optim_state_dict: state by name, as :func:`full_optim_state_dict` and
            ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` return it; or the
            ``state_dict()`` of an optimizer of the unwrapped model, whose numbers must follow its
            ``parameters()``, group by group. Options that only select an implementation
            (``foreach``, ``fused``, ...) are not loaded.

    Raises:
        ModelMismatchError: parameters, groups, shapes or options do not match. Nothing is changed.
        ValueError: ``optim_state_dict`` is ``None`` on rank 0.
        UnsupportedValueError: rank 0 cannot send an option or state.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    inventory = agree_on_inventory(exchange, model)
    label = "optim_state_dict"

    def look(given: Any) -> dict[str, Any]:
        saved = convert_numbers_to_names(given, inventory, optimizer, label)
        return {"state": saved.state, "groups": saved.groups}

    def match(found: dict[str, Any]) -> OptimizerMatch:
        groups, saved = members_of_groups(inventory, optimizer), OptimizerState(**found)
        return match_optimizer(inventory, optimizer, groups, saved, label)

    matched = match_given(exchange, label, optim_state_dict, look, match)
    exchange.run_and_gather(f"load {label}", lambda: load_optimizer_values(matched))


def _decode_single(state: State, to: torch.device | None) -> dict[str, Any]:
    found = {}
    for key, encoded in state.single.items() if to is not None else ():
        value = values.decode(encoded["value"], key)
        found[key] = value.to(to) if encoded.get("on") == "device" else value
    return found


def _convert(
    converter: StateConverter,
    shard: ParameterShard,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
    to: torch.device,
) -> dict[str, Any]:
    """The state of the same optimizer on the unwrapped model."""
    saved = {key: [v] if key in converter.member_state else v for key, v in saved.items()}
    loaded = converter.load_saved_state(unsharded_placeholder(shard), saved, group)
    return {key: v.to(to) if isinstance(v, torch.Tensor) else v for key, v in loaded.items()}


def _detached(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
