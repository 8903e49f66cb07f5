"""What autograd saves of a gathered parameter: not its value, but how to get it again.

Operators save their inputs for the backward. If an input is a gathered parameter, or a view or a
cast of one (``weight.t()`` in a linear layer, ``weight.to(bfloat16)`` under autocast, a chunk of a
fused projection), the saved tensor would keep the full parameter in memory until the backward. The
graph of the saved tensor tells where it came from: following it through operators that only view,
copy or cast leads to the node that gathered the parameter. Then the steps are saved instead, and
replayed on the regathered parameter when the backward asks for the tensor.

Parameters that need no gradient come out of the same node as the others (see ``gathering.py``), so
they are recognised the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .gathering import GatherNode, Pass

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps``, last first, applied to parameter ``index`` of a unit's pass."""

    source: Pass
    index: int
    steps: tuple[Step, ...]

    def rebuild(self) -> torch.Tensor:
        value = self.source.value(self.index)
        with torch.no_grad():
            for step in reversed(self.steps):
                value = step(value)
        return value


@contextlib.contextmanager
def parameters_saved_as_recipes() -> Iterator[None]:
    """Within, autograd saves gathered parameters, views and casts of them as recipes.

    Every other tensor goes to the hooks that were active before (activation offloading, say), or
    is saved as it is.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None and outer[0] is _pack:
        yield
        return
    if outer is None:
        pack, unpack = _pack, _unpack
    else:
        pack, unpack = _delegating(*outer)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True)
class _Saved:
    """Any other tensor. Where there are hooks, autograd itself does not check for changes."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was changed "
                f"in place after the forward used it: it is at version {self.tensor._version}, "
                f"expected was {self.version}; replace the in-place operation"
            )
        return self.tensor


def _pack(tensor: torch.Tensor) -> Any:
    return recipe_of(tensor) or _Saved(tensor, tensor._version)


def _unpack(packed: Any) -> torch.Tensor:
    return packed.rebuild() if type(packed) is Recipe else packed.unchanged()


def _delegating(outer_pack: Callable, outer_unpack: Callable) -> tuple[Callable, Callable]:
    def pack(tensor: torch.Tensor) -> Any:
        return recipe_of(tensor) or (outer_pack(tensor),)

    def unpack(packed: Any) -> torch.Tensor:
        return packed.rebuild() if type(packed) is Recipe else outer_unpack(packed[0])

    return pack, unpack


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """How to rebuild ``tensor`` from a gathered parameter, or ``None`` if it is not made of one."""
    node = tensor.grad_fn
    # What was changed in place after it was made cannot be made again the same way.
    if node is None or tensor._version:
        return None
    steps: list[Step] = []
    output = tensor.output_nr
    while True:
        if isinstance(node, GatherNode):
            source = node.source()
            # A pass that is gone has no values to rebuild from; its tensors are the user's own.
            return Recipe(source, output, tuple(steps)) if source is not None else None
        make_step = _STEPS.get(type(node).__name__)
        if make_step is None:
            return None
        shape_and_type = node._input_metadata[output]
        steps.append(make_step(node, output, shape_and_type))
        node, output = node.next_functions[0]
        if node is None:
            return None


def _signed(dim: int) -> int:
    # Autograd shows negative dimensions as unsigned 64-bit numbers.
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _view(node: Any, output: int, meta: Any) -> Step:
    shape = tuple(meta.shape)
    return lambda t: t.reshape(shape)


def _expand(node: Any, output: int, meta: Any) -> Step:
    shape = tuple(meta.shape)
    return lambda t: t.expand(shape)


def _cast(node: Any, output: int, meta: Any) -> Step:
    dtype, device = meta.dtype, meta.device
    return lambda t: t.to(device=device, dtype=dtype)


def _same(node: Any, output: int, meta: Any) -> Step:
    return lambda t: t


def _transpose(node: Any, output: int, meta: Any) -> Step:
    dims = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return lambda t: t.transpose(*dims)


def _permute(node: Any, output: int, meta: Any) -> Step:
    dims = tuple(_signed(dim) for dim in node._saved_dims)
    return lambda t: t.permute(dims)


def _select(node: Any, output: int, meta: Any) -> Step:
    dim, index = _signed(node._saved_dim), _signed(node._saved_index)
    return lambda t: t.select(dim, index)


def _slice(node: Any, output: int, meta: Any) -> Step:
    dim, length = _signed(node._saved_dim), node._saved_self_sym_sizes
    bounds = slice(_bound(node._saved_start), _bound(node._saved_end), node._saved_step)
    start, stop, step = bounds.indices(length[dim])
    return lambda t: torch.ops.aten.slice(t, dim, start, stop, step)


def _bound(value: int | None) -> int | None:
    return None if value is None else _signed(value)


def _split(node: Any, output: int, meta: Any) -> Step:
    dim, size = _signed(node._saved_dim), node._saved_split_size
    return lambda t: t.split(size, dim)[output]


def _split_with_sizes(node: Any, output: int, meta: Any) -> Step:
    dim, sizes = _signed(node._saved_dim), list(node._saved_split_sizes)
    return lambda t: t.split(sizes, dim)[output]


def _unbind(node: Any, output: int, meta: Any) -> Step:
    dim = _signed(node._saved_dim)
    return lambda t: t.select(dim, output)


def _diagonal(node: Any, output: int, meta: Any) -> Step:
    offset = _signed(node._saved_offset)
    dims = _signed(node._saved_dim1), _signed(node._saved_dim2)
    return lambda t: t.diagonal(offset, *dims)


# By name of the autograd node. An operator that is not listed ends the search: its result is then
# an activation like any other and is saved as such.
_STEPS: dict[str, Callable[..., Step]] = {
    "TBackward0": lambda node, output, meta: torch.Tensor.t,
    "TransposeBackward0": _transpose,
    "TransposeBackward1": _transpose,
    "PermuteBackward0": _permute,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "UnsqueezeBackward0": _view,
    "SqueezeBackward0": _view,
    "SqueezeBackward1": _view,
    "SqueezeBackward2": _view,
    "ViewCopyBackward0": _view,
    "ExpandBackward0": _expand,
    "SelectBackward0": _select,
    "SliceBackward0": _slice,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split_with_sizes,
    "UnbindBackward0": _unbind,
    "DiagonalBackward0": _diagonal,
    "ToCopyBackward0": _cast,
    "AliasBackward0": _same,
    "_KeptBackward": _same,  # see collectives/order.py
}
