"""Checks of how a script uses a wrapped model."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
import torch_xla.runtime as xr
from torch import nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.nn.parameter import UninitializedParameter

from ..collectives.world import World, all_gather_object
from ..names import dotted
from ..ranks.rank import is_simulated_rank
from ..ranks.slices import slices_of_ranks
from ..ranks.watchdog.watch_settings import log_line
from ..tree import overrides_dispatch, tensors_in
from .deferred_values import require_all_initialized
from .freeing import stamps
from .ignored import ignored_mark_of, is_ignored
from .sharded_parameter import ShardedParameter
from .sharded_tensor import ReleasedParameter, flattened_in, sharded_tensor_of
from .unit import NamedUnits, Unit

# On a parameter that no wrapper shards, once a warning has named it.
WARNED = "_xla_fsdp_warned_unsharded"


def require_values(units: NamedUnits, doing: str) -> None:
    require_all_initialized([(path, unit.uninitialized) for path, unit in units], doing)


def require_all_sharded(root: nn.Module, units: NamedUnits) -> None:
    """Warns about trainable parameters in ``root`` that no unit in it shards."""
    sharded = {shard for _, unit in units for shard in unit.shards}
    names = []
    for name, parameter in root.named_parameters():
        ignored = ignored_mark_of(parameter) is not None
        if parameter.requires_grad and parameter not in sharded and not ignored:
            setattr(parameter, WARNED, True)
            names.append(name)
    if names:
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{some} came into the model after it was wrapped. They are not sharded, and their "
            "gradients are not averaged over the ranks, so the ranks' values will diverge. Add "
            "modules before wrapping, or wrap them",
            stacklevel=2,
        )


def compare_initial_weights(world: World, units: NamedUnits) -> None:
    """Warns, once, if ranks built the model with different weights. All ranks must call it.

    Parameters that were changed since, and groups with independent copies, are not compared.
    """
    holders = world.size * world.replicas
    if holders == 1 or holders != xr.world_size() or is_simulated_rank():
        return
    own = {
        path: unit.initial_checksum
        for path, unit in units
        if unit.initial_stamps == stamps(unit.shards)
    }
    everyone = all_gather_object(world, "xla_fsdp initial weights", own)
    if everyone is None:  # another rank gets the values and warns
        return
    differing = [path for path in own if len({each[path] for each in everyone if path in each}) > 1]
    if differing:
        some = ", ".join(repr(path or "the root") for path in differing[:5])
        warnings.warn(
            f"ranks built {some} with different weights, so the sharded model is a mixture of "
            "them, and replicas differ. Call torch.manual_seed with the same number on every rank "
            "before building the model, or pass sync_module_states=True, which takes the weights "
            "of rank 0",
            stacklevel=2,
        )


def log_slices(world: World) -> None:
    """Rank 0 logs how a model is sharded if there are several slices."""
    slices = slices_of_ranks()
    if not slices or xr.global_ordinal() != 0 or is_simulated_rank():
        return
    where = f"{len(slices)} slices of {len(slices[0])} ranks"
    if world.replicas > 1 and set(world.groups) == set(slices):
        log_line(
            f"{where}: the model is sharded within each slice and replicated over the slices. Pass "
            "sharding_strategy=ShardingStrategy.FULL_SHARD to shard over all ranks"
        )
    elif any(not any(set(group) <= set(one) for one in slices) for group in world.groups):
        log_line(
            f"{where}: the model is sharded over ranks of several slices, so every gather uses the "
            "network between them"
        )


_REMEDY = (
    "leave torch.compile out: a step is traced without it, and XLA compiles all of it as one "
    "program"
)


def require_plain_call(name: str, args: Any, kwargs: Any) -> None:
    """Raises RuntimeError inside torch.compile, torch.func, and what makes a graph for export."""
    if torch.compiler.is_dynamo_compiling():
        _raise_compiled(name)
    # Not torch.compiler.is_compiling(): one flag of all ranks that are threads.
    makes_graph = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    traced = isinstance(args, Proxy) or any(
        isinstance(one, (Proxy, FakeTensor)) for one in (*args, *kwargs.values())
    )
    if makes_graph or torch.jit.is_tracing() or traced:
        raise_exported(f"the forward of {name}")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"the forward of {name}, which is wrapped, was called inside a transformation of "
            "torch.func (grad, vmap, jvp, jacrev, ...), which does not support shards. For "
            "gradients call backward, or torch.autograd.grad(loss, inputs, create_graph=True) for "
            "gradients of inputs; use a batch dimension instead of vmap; or transform "
            "the model before wrapping, or a function of its output"
        )


def require_uncompiled(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise RuntimeError(
                f"module {name or type(module).__name__!r} in a wrapper is compiled by "
                "torch.compile. Its graphs would be separate programs that take the full "
                "parameters as inputs and never free them, and ranks that are threads of one "
                f"process would compile at the same time; {_REMEDY}"
            )


def raise_exported(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}, which is wrapped, was called by torch.jit, torch.fx, torch.export or torch.onnx, "
        "in whose graph this rank's shards would be constants. Give them a model that is not "
        "wrapped, with the values that xla_fsdp.full_state_dict(model) returns"
    )


@torch.compiler.disable(reason=_REMEDY)
def _raise_compiled(name: str) -> NoReturn:
    raise RuntimeError(
        f"the forward of {name}, which is wrapped, was called inside torch.compile: {_REMEDY}"
    )


def require_unscanned(path: str, unit: Unit) -> None:
    """Raises RuntimeError if the module ``path``, which ``unit`` shards, is in scanned blocks."""
    if unit.depth:
        raise RuntimeError(
            f"module {path!r} is also in the first of the scanned blocks, and represents all of "
            "them now, so under this name it would have no values of its own. Remove the name "
            "outside of the blocks before wrapping, or wrap each block separately"
        )


def warn_if_memory_is_shared(named: dict[nn.Parameter, str]) -> None:
    """Warns of different parameters in the same memory, as ``a.data = b.data`` makes them."""
    first: dict[int, str] = {}
    for parameter, name in named.items():
        if parameter.device.type != "cpu" or not parameter.numel():
            continue
        other = first.setdefault(parameter.data_ptr(), name)
        if other != name:
            warnings.warn(
                f"parameters {other!r} and {name!r} are different, but share memory, so that "
                "without wrapping a change of one is a change of the other. After wrapping they "
                "are separate. Assign one nn.Parameter to both modules before wrapping, or copy "
                "one (parameter.data = parameter.data.clone())",
                stacklevel=2,
            )


class InputDeviceError(RuntimeError):
    """The forward of a wrapped module failed, and some inputs are not on its device."""


def raise_if_on_other_device(
    module: str, inputs: Any, device: torch.device, error: RuntimeError
) -> None:
    """Raises InputDeviceError from ``error`` if ``inputs`` were not all on ``device``."""
    elsewhere = [tensor for tensor in tensors_in(inputs) if tensor.device != device]
    # Subclasses (torch.OutOfMemoryError) state another reason.
    if elsewhere and type(error) in (RuntimeError, NotImplementedError):
        raise InputDeviceError(
            f"{error}\nThe forward of {module} that raised this got a tensor of shape "
            f"{tuple(elsewhere[0].shape)} on {elsewhere[0].device}, while its parameters are on "
            f"{device}. If it does not move its inputs itself, move inputs there with "
            f".to({str(device)!r})"
        ) from error


def warn_if_elsewhere(
    module: str, inputs: Any, elsewhere: set[torch.device], device: torch.device
) -> None:
    """Warns if outputs of a ``module`` on ``device`` are where its inputs are, in ``elsewhere``.

    torch_xla computes most convolutions of CPU tensors there, and the backward raises.
    """
    given = [tensor for tensor in tensors_in(inputs) if tensor.device in elsewhere]
    if given:
        warnings.warn(
            f"the forward of {module} got a tensor of shape {tuple(given[0].shape)} on "
            f"{given[0].device} and returned its result there, while its parameters are on "
            f"{device}. Convolutions compute like that, and then fail in the backward. Move inputs "
            f"there with .to({str(device)!r}); ignore this warning if the module moves its inputs "
            "and outputs itself",
            stacklevel=2,
        )


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called; nothing can be gathered for an ``nn.ModuleList``."""
    none = nn.Module.forward
    forward = getattr(module, "forward", none)
    return type(module).forward is not none or getattr(forward, "__func__", forward) is not none


def require_shardable_parameters(path: str, module: nn.Module) -> None:
    """Raises ValueError, TypeError or RuntimeError if ``module`` cannot be sharded correctly."""
    name = path or type(module).__name__
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not is_ignored(module)
    if looks_up and module.max_norm is not None:
        raise ValueError(
            f"{type(module).__name__} {name!r} has max_norm={module.max_norm}, with which a "
            "forward changes the rows that it reads, different ones on each rank. Set max_norm to "
            "None, and compute with shortened rows (e = embedding(i); e * (max_norm / "
            "e.norm(dim=-1, keepdim=True)).clamp(max=1))"
        )
    if looks_up and module.scale_grad_by_freq and xr.world_size() > 1:
        raise ValueError(
            f"{type(module).__name__} {name!r} has scale_grad_by_freq=True, which divides a row's "
            "gradient by how often it is looked up, here only in this rank's part of the batch. "
            "Set it to False, or exclude the module from sharding with ignored_modules"
        )
    if looks_up and module.sparse and module.weight.requires_grad:
        raise ValueError(
            f"{type(module).__name__} {name!r} has sparse=True, but there are no sparse gradients "
            "on XLA. Leave sparse out; results are the same"
        )
    if flattened_in(module):
        raise RuntimeError(
            f"the parameters of module {name!r} are flattened into the vector of another wrapper, "
            "which is not part of the module to wrap. Replace the module by that wrapper (wrapper, "
            "not wrapper.module), or wrap it without flatten_parameters"
        )
    for key, parameter in module._parameters.items():
        if isinstance(parameter, ReleasedParameter) and sharded_tensor_of(parameter) is None:
            raise RuntimeError(
                f"parameter {dotted(path, key)!r} of {type(module).__name__} is tied either to a "
                "parameter of scanned blocks, which cannot share parameters, or to one of another "
                "wrapper that was moved since (model.to(device)). In the first case untie it, or "
                "wrap each block separately; in the second case move the model before wrapping the "
                "first of its modules"
            )
        if isinstance(parameter, UninitializedParameter):
            raise RuntimeError(
                f"parameter {dotted(path, key)!r} of {type(module).__name__} is lazy and has no "
                "shape yet. Run the module once on an input before wrapping it, or build it with "
                "its sizes"
            )
        known = sharded_tensor_of(parameter) is not None or ignored_mark_of(parameter) is not None
        if parameter is None or known:
            continue
        kind, called = type(parameter), dotted(path, key)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"parameter {called!r} is of a module that torch.jit made, in which it cannot be "
                "replaced by shards. Wrap the module that torch.jit was given, or exclude this one "
                "from sharding with ignored_modules"
            )
        if issubclass(kind, ShardedParameter):
            raise RuntimeError(
                f"parameter {called!r} is the shard of a wrapper that no longer exists, so "
                "its full parameter is not known. Build the module again, and keep its wrapper"
            )
        own_function = kind.__torch_function__ is not nn.Parameter.__torch_function__
        if own_function or overrides_dispatch(kind):
            raise TypeError(
                f"parameter {called!r} is a {kind.__name__}, which overrides operators, but the "
                "gathered parameter would be a plain tensor without them. Use an nn.Parameter, or "
                "exclude it from sharding with ignored_parameters"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"parameter {called!r} has a hook from before the wrapping, which would never be "
                f"called. Register it after wrapping, on model.get_parameter({called!r}); there it "
                "is called with this rank's shard of the mean gradient"
            )
        if parameter.grad is not None:
            warnings.warn(
                f"parameter {called!r} has a gradient from before the wrapping, which is dropped. "
                "Wrap before the first backward, or call zero_grad() before wrapping",
                stacklevel=2,
            )
