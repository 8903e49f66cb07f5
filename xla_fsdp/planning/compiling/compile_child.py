"""Compiles one program for a TPU slice, in a process of its own:
``python compile_child.py DIR PARENT``.

libtpu reads its settings from the environment when it is loaded, prints what it likes, and ends the
process when it does not like a program; none of that may happen to the caller. ``DIR/request.json``
and one more file say what to compile: ``DIR/step.hlo``, the program of every device, or, where the
request says ``partitioned``, ``DIR/step.stablehlo``, one program of all devices together, with
shardings, for the compiler to partition. The results, all in DIR:

- ``result.json``: the compiler's memory figures and seconds, or ``error`` and its kind;
- ``scheduled.txt``: the scheduled program;
- ``dump/``: what XLA wrote while compiling, with the buffer assignment, the traced program, and
  the value that each flag of libtpu had.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any


def program_file(request: dict) -> str:
    """Name of the file that holds the program."""
    return "step.stablehlo" if request.get("partitioned") else "step.hlo"


def main(folder: Path, parent: int) -> None:
    watch = threading.Thread(target=_end_with_parent, args=(folder, parent), daemon=True)
    watch.start()
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",  # this is not a TPU host
        JAX_PLATFORMS="cpu",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else a lock file allows one process a machine
        XLA_FLAGS=f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text",
        LIBTPU_INIT_ARGS=request["arguments"],
        TPU_MIN_LOG_LEVEL="3",
    )
    os.environ.pop("TPU_MEGACORE", None)  # stated with the topology
    began = time.monotonic()
    try:
        result = compile_step(folder, request)
    except Exception as error:
        kind = "memory" if "RESOURCE_EXHAUSTED" in str(error) else type(error).__name__
        result = {"error": str(error), "kind": kind, "seconds": time.monotonic() - began}
    result["host_memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / "result.json").write_text(json.dumps(result))


def _end_with_parent(folder: Path, parent: int) -> None:
    """Whoever asked was killed, and could not tidy up."""
    while os.getppid() == parent:
        time.sleep(0.2)
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.02)  # the compiler has just written into it
    os._exit(1)


def compile_step(folder: Path, request: dict) -> dict:
    import jaxlib._jax
    import jaxlib.mlir.ir as ir
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(
        topology_name=request["libtpu_name"], platform="tpu", **request["topology_options"]
    )
    devices: list[Any] = sorted(slice_.devices, key=lambda device: device.id)
    if len(devices) != request["devices"]:
        raise ValueError(f"expected {request['devices']} devices, libtpu has {len(devices)}")
    partitioned = request.get("partitioned")
    replicas, partitions = (1, len(devices)) if partitioned else (len(devices), 1)
    program = (folder / program_file(request)).read_bytes()
    if not partitioned:
        program = jaxlib._jax.mlir.hlo_to_stablehlo(program)
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        _donate(ir, module, set(request["donated"]))
        for name, number in (("replicas", replicas), ("partitions", partitions)):
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
            module.operation.attributes[f"mhlo.num_{name}"] = count
        code = mlir.module_to_bytecode(module)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    if partitioned:
        build = options.executable_build_options
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = partitioned["shardy"]
        # An output without a sharding of its own gets what it is computed in, as in torch_xla.
        build.allow_spmd_sharding_propagation_to_output = [True]
    ids = [device.id for device in devices]
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array(ids).reshape(replicas, partitions)
    )
    began = time.monotonic()
    executable = devices[0].client.compile(code, xla_client.DeviceList(tuple(devices)), options)
    seconds = time.monotonic() - began
    memory = executable.get_compiled_memory_stats()
    (folder / "scheduled.txt").write_text(executable.hlo_modules()[0].to_string())
    return {
        "seconds": seconds,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
            "host_temporaries": memory.host_temp_size_in_bytes,
        },
    }


def _donate(ir: Any, module: Any, donated: set[int]) -> None:
    """States which arguments' buffers outputs may take over; the compiler pairs them."""
    main = ir.SymbolTable(module.operation)["main"]
    given = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else []
    attributes = []
    for number in range(len(main.type.inputs)):
        known = {one.name: one.attr for one in given[number]} if given else {}
        if number in donated and "tf.aliasing_output" not in known:
            known["jax.buffer_donor"] = ir.BoolAttr.get(True)
        attributes.append(ir.DictAttr.get(known))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
