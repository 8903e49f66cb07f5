"""Operations that a scanned block must not do: they would be lost, or give wrong results."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import xlac
from ..names import dotted
from ..sharding.freeing import free_, stamps
from ..sharding.gathering import GatherNode, raise_changed_in_forward
from ..sharding.sharded_tensor import raise_replaced, sharded_tensor_of
from ..tree import tensors_in
from .equality import require_no_hooks
from .unit import ScanUnit

_DRAWS = frozenset(
    """bernoulli cauchy dropout exponential geometric log_normal multinomial normal poisson rand
    rand_like randint randint_like randn randn_like random randperm uniform""".split()
)


def require_unchanged_structure(unit: ScanUnit) -> None:
    """Before a forward: raises RuntimeError if a parameter was added to the blocks or removed since
    they were passed to ``scan_blocks``, and ValueError if a hook was added."""
    unit.require_shards_installed()
    known = {use for stack in unit.parameters for use in stack.uses}
    for path, module in unit.module.named_modules():
        require_no_hooks(path, module)
        for name, parameter in module._parameters.items():
            if parameter is not None and (module, name) not in known:
                raise_replaced(unit.comms.label + dotted(path, name))


@contextlib.contextmanager
def forbid_lost_changes(
    unit: ScanUnit, full: Sequence[torch.Tensor], given: Collection[int]
) -> Iterator:
    """Around the call of the template: raises RuntimeError if it changes or replaces one of its
    parameters ``full``, and ValueError if it stores a computed tensor in an attribute.

    ``given``: the result of :func:`inputs_of` for its input tensors.
    """
    before, attributes = stamps(full), _attributes(unit)
    yield
    for stack, value, was, now in zip(unit.parameters, full, before, stamps(full), strict=True):
        if stack.value is not value or now != was:
            raise_changed_in_forward(unit.comms.label + stack.name)
    for key, tensors in _attributes(unit).items():
        known = {id(tensor) for tensor in attributes.get(key, ())}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        if inputs_of(new) & set(given):
            path, name = key
            free_(new, unit.placeholder)  # otherwise torch_xla would try to compute it
            raise ValueError(
                f"the forward of {type(unit.module).__name__} stores a computed tensor in "
                f"{dotted(path, name)!r}. Scanned blocks are traced once for all, so it would have "
                "no value there: add it to the tensor that the block returns, register a buffer "
                "for numbers that need no gradient, or wrap each block separately"
            )


def inputs_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the device values that ``tensors`` are computed from, except single numbers, which may
    be unrelated constants."""
    on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if not on_device:
        return set()
    numbers, values = xlac.device_data_of(on_device)
    return {number for number, value in zip(numbers, values, strict=True) if value.dim()}


def _attributes(unit: ScanUnit) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Tensors in attributes of modules and parameters, by path and name."""
    holders = [(path, vars(module)) for path, module in unit.module.named_modules()]
    holders += [(tensor.key, tensor.attributes_of(0)) for tensor in unit.stored]
    return {
        (path, name): found
        for path, attributes in holders
        for name, value in attributes.items()
        if name not in ("_parameters", "_buffers", "_modules") and (found := tensors_in(value))
    }


def require_known_graph(block: nn.Module, y: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if ``y``, made by ``block``, depends on a tensor that needs a gradient and
    is not in ``leaves``: the loop would not give it a gradient."""
    known = {id(leaf) for leaf in leaves}
    edges, seen = [(y.grad_fn, 0)], set()
    while edges:
        node, output = edges.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        source = node.source() if isinstance(node, GatherNode) else None
        what = ""
        if source is not None:
            what = f"computed from {source.unit.name_of(output)!r}"
        elif leaf is not None and id(leaf) not in known:
            sharded = sharded_tensor_of(leaf)
            what = (
                f"a tensor of shape {tuple(leaf.shape)}" if sharded is None else repr(sharded.key)
            )
        if what:
            raise ValueError(
                f"the forward of {type(block).__name__} uses a tensor from outside of the block "
                f"that needs a gradient, {what}, through an attribute or a closure. Scanned blocks "
                "give gradients only to their parameters and arguments: pass it as an argument, "
                "blocks(x, it), or detach() it"
            )
        edges += node.next_functions


def require_no_graph(block: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Raises ValueError if the new value of a buffer of ``block`` has a graph."""
    if buffer.requires_grad:
        raise ValueError(
            f"the forward of {type(block).__name__} gives its buffer {name!r} a value that needs "
            "a gradient, but in scanned blocks gradients flow only through the returned tensor. "
            "Call detach() on it, add its effect to that tensor, or wrap each block separately"
        )


class ForbidHostRandomNumbers(TorchFunctionMode):
    """Around the call of ``block``: random numbers drawn on the host raise ValueError."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").rstrip("_")
        if name in _DRAWS and isinstance(found, torch.Tensor) and found.device.type == "cpu":
            raise ValueError(
                f"the forward of {type(self._block).__name__} draws random numbers on the host "
                f"({name}). Scanned blocks are traced once for all, so all would get the same, and "
                "their backward different ones: draw on the device of the input (torch.rand((), "
                "device=x.device)) and choose by torch.where, or wrap each block separately"
            )
        return found
