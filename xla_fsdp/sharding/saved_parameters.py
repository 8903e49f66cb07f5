"""What autograd saves of a gathered parameter: not its value, but how to get it again.

Operators save their inputs for the backward. If an input is a gathered parameter, or a view or a
cast of one (``weight.t()`` in a linear layer, ``weight.to(bfloat16)`` under autocast, a chunk of a
fused projection), the saved tensor would keep the full parameter in memory until the backward. So a
recipe is saved instead: which parameter, and which casts and views of it. It is followed with the
regathered parameter when the backward asks for the tensor.

A view knows what it is a view of, and can be replayed on another tensor. A cast knows nothing of
its origin, and autocast makes casts inside of other operators, so the operator that casts notes it
on what it returns. Neither needs a graph, so frozen parameters are recognised like others.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._python_dispatch import TorchDispatchMode

from ..tree import map_tensors
from .gathering import Pass
from .unsharded import UnshardedParameter

# A cast to a dtype, or a view: of a tensor on the meta device, which takes no memory. (A view on
# XLA keeps what it is a view of, and each view in between, although they share no data.)
Step = torch.dtype | torch.Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps`` applied to full parameter ``index`` of a unit's pass."""

    source: Pass
    index: int
    steps: tuple[Step, ...]

    def rebuild(self) -> torch.Tensor:
        value = self.source.value(self.index)
        with torch.no_grad():
            for step in self.steps:
                if isinstance(step, torch.Tensor):
                    value = step._view_func_unsafe(value)
                else:
                    value = value.to(step)
        return value


# On the result of a cast: a `_Cast`.
_CAST = "_xla_fsdp_cast"


@dataclass(frozen=True, slots=True)
class _Cast:
    """A recipe of the result of a cast, which does not keep the pass alive."""

    source: Callable[[], Pass | None]
    index: int
    steps: tuple[Step, ...]

    def __reduce__(self) -> tuple:
        """Of a cast that is copied or pickled, nothing is known."""
        return type(None), ()


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
    """How to rebuild ``tensor`` from a full parameter, or ``None`` if it is not made of one."""
    viewed = tensor._base
    base = tensor if viewed is None else viewed
    steps: tuple[Step, ...]
    if isinstance(base, UnshardedParameter):
        origin = base._xla_fsdp_origin
        source, index, steps = origin.source(), origin.number, ()
    else:
        cast: _Cast | None = base.__dict__.get(_CAST)
        if cast is None:
            return None
        source, index, steps = cast.source(), cast.index, cast.steps
    # A pass that is gone has no values to rebuild from; its tensors are the user's own. What was
    # changed in place after it was made cannot be made again the same way.
    if source is None or tensor._version:
        return None
    return Recipe(source, index, steps if viewed is None else (*steps, _on_meta(tensor, viewed)))


def _on_meta(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A view of a tensor like ``base`` on the meta device, as ``view`` is one of ``base``."""
    empty = torch.empty(base.shape, dtype=base.dtype, device="meta")
    with torch.no_grad(), _force_original_view_tracking(True):
        try:
            return view._view_func_unsafe(empty)
        except RuntimeError:  # Tensor.view of what is not contiguous there; on XLA everything is
            # What torch caches of an operator in such a mode is not safe for threads.
            with _ONE_AT_A_TIME, _Contiguous():
                return view._view_func_unsafe(empty)


_ONE_AT_A_TIME = threading.Lock()


class _Contiguous(TorchDispatchMode):
    """Within, views on the meta device are contiguous."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return map_tensors(
            lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"),
            func(*args, **(kwargs or {})),
        )


# The operator behind every cast on XLA devices, whoever calls it. Called with its set of keys.
_cast = torch.library.get_kernel("aten::_to_copy", "AutogradXLA")


def _noted_cast(keys: Any, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """The operator itself, which notes on its result what full parameter that is a cast of."""
    result = _cast.call_boxed(keys, tensor, **options)
    made = recipe_of(tensor)
    if made is not None and result.device == tensor.device:
        source, steps = weakref.ref(made.source), (*made.steps, result.dtype)
        setattr(result, _CAST, _Cast(source, made.index, steps))
    return result


_OPERATORS = torch.library.Library("aten", "IMPL")
_OPERATORS.impl("_to_copy", _noted_cast, "AutogradXLA", with_keyset=True)
