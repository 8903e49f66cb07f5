"""What one block, traced for all of them, must not do, because it would be lost or wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

import torch
import torch_xla
from torch import nn

from ..names import dotted
from ..sharding.attributes import refuse_replacement
from ..sharding.freeing import stamps
from ..sharding.gathering import refuse_change_in_forward
from ..sharding.sharded_tensor import home_of
from ..tree import tensors_in
from .equality import require_no_hooks
from .unit import ScanUnit


def require_as_built(unit: ScanUnit) -> None:
    """Before a forward: raises RuntimeError if a parameter came into the blocks, or went, since
    they were given to ``scan_blocks``, and ValueError if a hook came."""
    unit.require_resting()
    known = {spot for stack in unit.parameters for spot in stack.spots}
    for path, module in unit.template.named_modules():
        require_no_hooks(path, module)
        for name, parameter in dict.items(module._parameters):
            if parameter is not None and (module, name) not in known:
                refuse_replacement(unit.wire.label + dotted(path, name))


@contextlib.contextmanager
def nothing_lost(unit: ScanUnit, full: Sequence[torch.Tensor], given: Collection[int]) -> Iterator:
    """Around the call of the template: raises RuntimeError if it changes or replaces one of its
    parameters, which are ``full``, and ValueError if it keeps a tensor.

    ``given``: what :func:`inputs_of` says of the tensors that it computes with.
    """
    before, attributes = stamps(full), _attributes(unit.template)
    yield
    for stack, value, was, now in zip(unit.parameters, full, before, stamps(full), strict=True):
        if stack.value is not value or now != was:
            refuse_change_in_forward(unit.wire.label + stack.name)
    for key, tensors in _attributes(unit.template).items():
        known = {id(tensor) for tensor in attributes.get(key, ())}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        if inputs_of(new) & set(given):
            path, name = key
            raise ValueError(
                f"the forward of {type(unit.template).__name__} keeps what it computes in "
                f"{dotted(path, name)!r}. Scanned blocks are traced once for all, so it would have "
                "no value there: return it in the tensor that the next block takes, register a "
                "buffer for numbers that need no gradient, or wrap the blocks singly"
            )


def inputs_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Numbers of the values on the device that ``tensors`` are computed from."""
    on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if not on_device:
        return set()
    return set(torch_xla._XLAC._get_tensors_xla_device_data_node(on_device)[0])


def _attributes(block: nn.Module) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Tensors in attributes of modules, by path and name."""
    return {
        (path, name): found
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and (found := tensors_in(value))
    }


def require_known_graph(
    block: nn.Module, y: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> None:
    """Raises ValueError if ``y``, which ``block`` made, depends on more that needs a gradient than
    ``leaves``: the loop would give it none."""
    known = {id(leaf) for leaf in leaves}
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            home = home_of(leaf)
            what = f"a tensor of shape {tuple(leaf.shape)}" if home is None else repr(home.key)
            raise ValueError(
                f"the forward of {type(block).__name__} uses something from outside of the block "
                f"that needs a gradient, {what}, by an attribute or a closure. Scanned blocks are "
                "traced once for all and give gradients to their parameters and arguments only: "
                "pass it as an argument, blocks(x, it), or detach() it"
            )
        nodes += [following for following, _ in node.next_functions]


def require_no_graph(block: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Raises ValueError if a buffer that ``block`` has updated would hand on a gradient."""
    if buffer.requires_grad:
        raise ValueError(
            f"the forward of {type(block).__name__} gives its buffer {name!r} a value that needs "
            "a gradient, which scanned blocks give through the tensor that they return only: "
            "detach() it, add what it stands for to that tensor, or wrap the blocks singly"
        )


def refuse_random_numbers_of_host(block: nn.Module) -> NoReturn:
    """Raises ValueError: the forward of ``block`` has drawn some."""
    raise ValueError(
        f"the forward of {type(block).__name__} draws random numbers on the host. Scanned blocks "
        "are traced once for all, so all would get the same number, and their backward another: "
        "draw on the device of the input (torch.rand((), device=x.device)) and choose by "
        "torch.where, or wrap the blocks singly"
    )
