"""Workload S with torch_xla's SPMD variant of FSDP ("FSDPv2"), lowered for a slice's devices.

``python -m benchmarks.peers.spmd FOLDER``: see ``child.py``. Nothing runs. Linear layers use
torch_xla's patch for SPMD, which does not flatten the input of the matmul: on v3-8 with libtpu
0.0.21, 68.3 million cycles and 1086 MiB of temporaries instead of 74.9 and 1227.

The step is traced on a mesh of ``STAND_IN`` CPU devices, and then the size of the mesh in the
shardings is replaced by that of the slice; the batch has its full size from the start. Only
shardings contain devices, so the program is the one of a mesh with all devices of the slice
(test_peers.py compares the two for 8 devices). A mesh of 128 devices cannot be traced directly:
autograd stores the number of devices in a signed byte.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .child import Request, write_answer

if TYPE_CHECKING:
    from xla_fsdp.planning.tracing.traced import TracedProgram

STAND_IN = 2  # devices of the traced mesh; with one, nothing is sharded
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARDING = re.compile(r'(mhlo\.sharding = "\{devices=\[)([\d,]+)\](?:<=\[\d+\]|[\d,]+)\}"')


def traced_step(request: Request, mesh_size: int) -> TracedProgram:
    """Trace the step over ``mesh_size`` devices, as HLO.

    The state of AdamW exists already, sharded like the parameters, as in every step but the first.
    """
    import numpy
    import torch
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as xr
    from torch_xla.core.xla_builder import create_placeholder_tensor
    from torch_xla.distributed.spmd.xla_sharding import apply_xla_patch_to_nn_linear
    from torch_xla.experimental import spmd_fully_sharded_data_parallel as fsdp_v2

    from xla_fsdp.planning.tracing.naming import plain_name
    from xla_fsdp.planning.tracing.traced import StepBoundary

    from ..workload_s import Network

    xr.use_spmd()
    sizes = request.sizes
    mesh = spmd.Mesh(numpy.arange(mesh_size), (mesh_size, 1), ("fsdp", "model"))

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        module = apply_xla_patch_to_nn_linear(module).to("xla")
        return fsdp_v2.SpmdFullyShardedDataParallel(module, mesh=mesh)

    model = wrap(Network(wrap, sizes.blocks, sizes.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in list(named.items()):
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(1.0)
        for moment in _MOMENTS:
            state[moment] = torch.zeros(parameter.shape).to("xla")
            spmd.mark_sharding(state[moment], mesh, _like(parameter.shape))
            named[f"{moment} of {name}"] = state[moment]
    boundary = StepBoundary(named.values())
    # A placeholder: the batch of a pod does not fit in this machine's memory.
    x = create_placeholder_tensor(
        (sizes.batch * request.devices, sizes.sequence, sizes.width), torch.float32
    )
    with torch.autocast("xla", dtype=torch.bfloat16):
        output = model(x)
    loss = output.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    names = {boundary.handle_of(tensor): name for name, tensor in named.items()}
    return boundary.lower([*named.values(), loss], names)


def _like(shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The sharding of a parameter by the wrapper: along its longest dimension (the first one)."""
    longest = shape.index(max(shape))
    return tuple("fsdp" if axis == longest else None for axis in range(len(shape)))


def resized(text: str, old: int, new: int) -> str:
    """Replace shardings of one dimension over ``old`` devices by ``new`` in StableHLO ``text``.

    Raises ValueError for a sharding of another kind.
    """

    def replace(found: re.Match) -> str:
        counts = found[2].split(",")
        if sorted(counts) != sorted([str(old)] + ["1"] * (len(counts) - 1)):
            raise ValueError(f"not one dimension over {old} devices: {found[0]}")
        counts = [str(new) if count == str(old) else count for count in counts]
        return f'{found[1]}{",".join(counts)}]<=[{new}]}}"'

    return _SHARDING.sub(replace, text)


def _with_sharded_batch(ir: Any, module: Any, request: Request) -> None:
    """Shard the batch, the only argument with its shape, on the first dimension."""
    main = ir.SymbolTable(module.operation)["main"]
    sizes = request.sizes
    shape = [sizes.batch * request.devices, sizes.sequence, sizes.width]
    attributes = list(main.attributes["arg_attrs"])
    (number,) = (
        number
        for number, one in enumerate(main.type.inputs)
        if ir.RankedTensorType(one).shape == shape
    )
    known = {one.name: one.attr for one in attributes[number]}
    sharding = f"{{devices=[{request.devices},1,1]<=[{request.devices}]}}"
    attributes[number] = ir.DictAttr.get({**known, "mhlo.sharding": ir.StringAttr.get(sharding)})
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def main(folder: Path) -> None:
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(STAND_IN))
    import jaxlib._jax
    import jaxlib.mlir.ir as ir
    from jax._src.interpreters import mlir

    request = Request.read(folder)
    traced = traced_step(request, STAND_IN)
    with mlir.make_ir_context():
        module = ir.Module.parse(jaxlib._jax.mlir.hlo_to_stablehlo(traced.hlo))
        text = module.operation.get_asm(enable_debug_info=True)
        module = ir.Module.parse(resized(text, STAND_IN, request.devices))
        _with_sharded_batch(ir, module, request)
        write_answer(folder, module, False, list(traced.arguments), traced.donated)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # the traced graph must not run, and freeing it takes time
