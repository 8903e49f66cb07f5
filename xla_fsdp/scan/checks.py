"""What one block, traced for all of them, must not do, because it would be lost or wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import xlac
from ..names import dotted
from ..sharding.attributes import refuse_replacement
from ..sharding.freeing import free_, stamps
from ..sharding.gathering import GatherNode, refuse_change_in_forward
from ..sharding.sharded_tensor import home_of
from ..tree import tensors_in
from .equality import require_no_hooks
from .unit import ScanUnit

_DRAWS = frozenset(
    """bernoulli cauchy dropout exponential geometric log_normal multinomial normal poisson rand
    rand_like randint randint_like randn randn_like random randperm uniform""".split()
)


def require_as_built(unit: ScanUnit) -> None:
    """Before a forward: raises RuntimeError if a parameter came into the blocks, or went, since
    they were given to ``scan_blocks``, and ValueError if a hook came."""
    unit.require_resting()
    known = {spot for stack in unit.parameters for spot in stack.spots}
    for path, module in unit.module.named_modules():
        require_no_hooks(path, module)
        for name, parameter in module._parameters.items():
            if parameter is not None and (module, name) not in known:
                refuse_replacement(unit.comms.label + dotted(path, name))


@contextlib.contextmanager
def nothing_lost(unit: ScanUnit, full: Sequence[torch.Tensor], given: Collection[int]) -> Iterator:
    """Around the call of the template: raises RuntimeError if it changes or replaces one of its
    parameters, which are ``full``, and ValueError if it keeps a tensor.

    ``given``: what :func:`inputs_of` says of the tensors that it computes with.
    """
    before, attributes = stamps(full), _attributes(unit)
    yield
    for stack, value, was, now in zip(unit.parameters, full, before, stamps(full), strict=True):
        if stack.value is not value or now != was:
            refuse_change_in_forward(unit.comms.label + stack.name)
    for key, tensors in _attributes(unit).items():
        known = {id(tensor) for tensor in attributes.get(key, ())}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        if inputs_of(new) & set(given):
            path, name = key
            free_(new, unit.placeholder)  # torch_xla would try to compute what is kept
            raise ValueError(
                f"the forward of {type(unit.module).__name__} keeps what it computes in "
                f"{dotted(path, name)!r}. Scanned blocks are traced once for all, so it would have "
                "no value there: return it in the tensor that the next block takes, register a "
                "buffer for numbers that need no gradient, or wrap the blocks singly"
            )


def inputs_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Numbers of the values on the device that ``tensors`` are computed from, but single numbers,
    which may be constants that have nothing to do with each other."""
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
    """Raises ValueError if ``y``, which ``block`` made, depends on more that needs a gradient than
    ``leaves``: the loop would give it none."""
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
            what = f"made of {source.unit.name_of(output)!r}"
        elif leaf is not None and id(leaf) not in known:
            home = home_of(leaf)
            what = f"a tensor of shape {tuple(leaf.shape)}" if home is None else repr(home.key)
        if what:
            raise ValueError(
                f"the forward of {type(block).__name__} uses something from outside of the block "
                f"that needs a gradient, {what}, by an attribute or a closure. Scanned blocks are "
                "traced once for all and give gradients to their parameters and arguments only: "
                "pass it as an argument, blocks(x, it), or detach() it"
            )
        edges += node.next_functions


def require_no_graph(block: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Raises ValueError if a buffer that ``block`` has updated would hand on a gradient."""
    if buffer.requires_grad:
        raise ValueError(
            f"the forward of {type(block).__name__} gives its buffer {name!r} a value that needs "
            "a gradient, which scanned blocks give through the tensor that they return only: "
            "detach() it, add what it stands for to that tensor, or wrap the blocks singly"
        )


class NothingDrawnOnHost(TorchFunctionMode):
    """Around the call of ``block``: random numbers on the host are a ValueError."""

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
                "their backward others: draw on the device of the input (torch.rand((), "
                "device=x.device)) and choose by torch.where, or wrap the blocks singly"
            )
        return found
