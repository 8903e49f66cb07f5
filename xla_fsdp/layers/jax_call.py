"""Functions of JAX, Pallas kernels included, as operators of torch_xla's graph.

``jax.export`` needs no TPU, and writes kernels in version 7 of Mosaic's format; libtpu 0.0.21
(torch_xla 2.9) does not read version 8, which ``jax.jit`` without a TPU writes. This holds for
:data:`KNOWN_JAX` only.
"""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
import torch_xla.core.xla_builder as xb

from .. import extras, xlac

KNOWN_JAX = ("0.7.1",)
DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
}
# Model FLOPs of kernels, for planning.
MODEL_FLOPS = "xla_fsdp_model_flops"
_KERNEL = "tpu_custom_call"
_Shapes = tuple[tuple[tuple[int, ...], str], ...]
# A line of MLIR text with a file, line and column.
_LOCATION = re.compile(r'^(#loc\d* = loc\()"(?:[^"\\]|\\.)*":\d.*\)$', re.MULTILINE)
# torch_xla's import of JAX changes the environment for a short time.
_ONE_AT_A_TIME = threading.Lock()


class UnsupportedJaxVersionError(ImportError):
    """A release of jax whose kernels are not tested with libtpu 0.0.21 and 0.0.51."""


@dataclass(frozen=True)
class Cost:
    """As Pallas' ``CostEstimate``; ``flops`` include padding, ``model_flops`` are the formula's."""

    flops: int
    bytes: int
    transcendentals: int = 0
    model_flops: int = 0


class Settings:
    """The first argument of a function. Hashable: with equal ones, it has the same trace.

    ``platform``: ``"tpu"`` or ``"cpu"``, where the program will run.
    """

    platform: str

    def costs(self, shapes: Sequence[tuple[int, ...]]) -> Mapping[str, Cost]:
        """Costs by prefix of the kernels' names, for arguments of ``shapes``."""
        return {}


JaxFunction = Callable[..., tuple[Any, ...]]


def call(
    function: JaxFunction, settings: Settings, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """``function(settings, *tensors)`` for tensors of :data:`DTYPES`, without gradient.

    Raises:
        MissingExtraError: jax is not installed.
        UnsupportedJaxVersionError: the installed jax is not in :data:`KNOWN_JAX`.
    """
    shapes = tuple((tuple(tensor.shape), DTYPES[tensor.dtype]) for tensor in tensors)
    with _ONE_AT_A_TIME:
        # Ranks that are threads must share one object: torch_xla compiles a program for each
        # object, and their collectives could deadlock.
        computation = _computation(function, settings, shapes)
    return xlac.call_computation(f"xla::{function.__name__}", list(tensors), computation)


@lru_cache(maxsize=64)
def _computation(function: JaxFunction, settings: Settings, shapes: _Shapes) -> object:
    extras.require_extra("plan", "a kernel written in JAX", ("jax", "jaxlib"))
    found = version("jax")
    if found not in KNOWN_JAX:
        raise UnsupportedJaxVersionError(
            f"jax {found} is installed, but kernels are tested only as exported by jax "
            f"{', '.join(KNOWN_JAX)}, in a format that libtpu 0.0.21 and 0.0.51 read. Run "
            f"pip install 'jax=={KNOWN_JAX[-1]}' 'jaxlib=={KNOWN_JAX[-1]}', or pass "
            "implementation='math'"
        )
    with xlac.jax_may_start():
        code = _exported(function, settings, shapes)
    return xb.computation_from_module_proto(function.__name__, code)


def _exported(function: JaxFunction, settings: Settings, shapes: _Shapes) -> bytes:
    import jax
    import jax.export
    import jaxlib._jax
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    def traced(*arrays: Any) -> tuple[Any, ...]:
        return function(settings, *arrays)

    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    kernels = jax.export.DisabledSafetyCheck.custom_call(_KERNEL)
    exported = jax.export.export(
        jax.jit(traced, keep_unused=True), platforms=[settings.platform], disabled_checks=[kernels]
    )(*arguments)
    costs = settings.costs([shape for shape, _ in shapes])
    with mlir.make_ir_context():
        module = ir.Module.parse(_LOCATION.sub(r"\1unknown)", exported.mlir_module()))
        _complete_kernels(ir, module, costs)
        code = mlir.module_to_bytecode(module)
    computation = jaxlib._jax.mlir.mlir_module_to_xla_computation(
        code, use_tuple_args=False, return_tuple=True
    )
    return computation.as_serialized_hlo_module_proto()


def _complete_kernels(ir: Any, module: Any, costs: Mapping[str, Cost]) -> None:
    """Writes their costs into kernels, and removes source locations, which differ by caller."""

    def complete(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and "kernel_name" in attributes:
            name = ir.StringAttr(attributes["kernel_name"]).value
            cost = next(cost for start, cost in costs.items() if name.startswith(start))
            config = json.loads(ir.StringAttr(attributes["backend_config"]).value)
            call = config["custom_call_config"]
            call["body"] = base64.b64encode(
                _without_locations(base64.b64decode(call["body"]))
            ).decode()
            call["cost_estimate"] = {
                "bytes_accessed": cost.bytes,
                "flops": cost.flops,
                "transcendentals": cost.transcendentals,
            }
            attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
            attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
                {MODEL_FLOPS: ir.StringAttr.get(str(cost.model_flops))}
            )
        return ir.WalkResult.ADVANCE

    module.operation.walk(complete)


def _without_locations(kernel: bytes) -> bytes:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True  # for Mosaic's serialized dialect
        module = ir.Module.parse(kernel)
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        written = io.BytesIO()
        # The version that JAX writes.
        module.operation.write_bytecode(written, desired_version=0)
    return written.getvalue()
