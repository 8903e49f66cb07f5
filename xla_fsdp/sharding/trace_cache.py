"""Functions of tensors that are traced once, and called as a single operator afterwards.

A traced operator costs the host a few microseconds, and a gather has a hundred. The compiler
inlines such computations, so the program is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from .. import xlac
from ..collectives.order import separate_collectives
from ..collectives.world import World

Tensors = list[torch.Tensor]


# A unit needs three for each shape of its inputs.
_MAX_CACHED = 16


class TraceCache:
    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[Hashable, Traced | None] = {}

    def __getstate__(self) -> dict[str, object]:
        """Computations cannot be copied or pickled; a copy starts with an empty cache."""
        return {"_world": self._world, "_known": {}}

    def __call__(
        self,
        name: str,
        function: Callable[[Tensors], Tensors],
        tensors: Tensors,
        key: Hashable,
    ) -> Tensors:
        """The result of ``function(tensors)``, without a gradient.

        ``key``, ``name`` and the shapes and dtypes of ``tensors`` must determine what it does.
        """
        if not tensors or xlac.is_eager():
            return function(tensors)
        # Here collectives have another name or number in each call.
        if xlac.has_scopes() or self._world.context is not None:
            known = self._trace(name, function, tensors)
        else:
            key = (name, key, *((tensor.shape, tensor.dtype) for tensor in tensors))
            known = self._known.pop(key, None) or self._trace(name, function, tensors)
            self._known[key] = known  # move to the end: the first is the least recently used
            if len(self._known) > _MAX_CACHED:
                del self._known[next(iter(self._known))]
        if known is None:
            return function(tensors)
        operands = [
            tensors[known.argument_of[n]] if n in known.argument_of else known.hoisted[n]
            for n in range(len(known.argument_of) + len(known.hoisted))
        ]
        return xlac.call_computation(f"xla::{name}", operands, known.computation)

    def _trace(
        self, name: str, function: Callable[[Tensors], Tensors], tensors: Tensors
    ) -> Traced | None:
        """``None`` if ``function`` must be called instead."""
        device = str(self._world.device)
        default = xlac.default_device()
        xlac.set_default_device(device)  # autograd's threads have another default device
        try:
            # Otherwise collectives inside would be ordered with those outside.
            with separate_collectives(self._world.device):
                shapes = [xlac.shape_on_device(tensor, device) for tensor in tensors]
                arguments = [xlac.placeholder(shape) for shape in shapes]
                pairs = zip(arguments, tensors, strict=True)
                if any(argument.dtype != tensor.dtype for argument, tensor in pairs):
                    return None  # torch_xla changed a dtype (XLA_USE_32BIT_LONG)
                outputs = function([separate_copy(one) for one in arguments])
                traced = Traced(name, arguments, outputs)
        finally:
            xlac.set_default_device(default)
        # Without operands, parameters have no elements.
        return traced if traced.argument_of or traced.hoisted else None


class Traced:
    """Traced tensors as a computation, and the sources of its parameters.

    Attributes:
        argument_of: parameter number to the number of the argument.
        hoisted: parameter number to a tensor that is not an argument (constants, closures).
        seed: the parameter that is the seed of random numbers, or ``None``.
    """

    def __init__(self, name: str, arguments: Tensors, outputs: Tensors) -> None:
        try:
            self._lower(name, arguments, outputs)
        except RuntimeError:
            # torch_xla misses tensors that a program finished since lowering began. Only this
            # rank's device, because others may be waiting for its next program.
            xm.wait_device_ops(xm.xla_real_devices([torch_xla.device()]))
            self._lower(name, arguments, outputs)

    def _lower(self, name: str, arguments: Tensors, outputs: Tensors) -> None:
        context = xlac.LoweringContext(name)
        context.build(outputs)
        self.computation = xb.computation_from_module_proto(name, context.hlo())
        self.argument_of: dict[int, int] = {}
        for number, argument in enumerate(arguments):
            parameter = context.tensor_parameter_id(argument)
            if parameter != -1:
                self.argument_of[parameter] = number
        self.hoisted = {
            parameter: tensor
            for parameter, tensor in context.device_parameter_id_tensor_mapping().items()
            if parameter not in self.argument_of
        }
        self.seed: int | None = None
        ids, nodes = xlac.device_data_of(outputs)
        seed_id = xlac.seed_id()
        if seed_id in ids:
            self.seed = context.tensor_parameter_id(nodes[ids.index(seed_id)])


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without a value, for tracing."""
    return xb.create_placeholder_tensor(tuple(shape), dtype)


def separate_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Equal to ``tensor``; for a function that may change it in place."""
    other = torch.empty_like(tensor)
    return other.copy_(tensor)  # no computation: it takes the same value
