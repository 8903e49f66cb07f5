"""Compiles one program for a TPU slice, in a separate process: ``compile_child.py DIR PARENT``.

The interpreter may be that of another environment, so this file imports nothing of this package.
It reads ``DIR/request.json`` and the program (see ``program_file``), and writes to DIR:

- ``result.json``: memory figures and seconds, or ``error`` and its kind: "memory", "topology"
  (libtpu does not know the slice), "names" (this jax lacks a name), or the exception's type;
- ``scheduled.pb``: the scheduled program, an ``HloModuleProto``;
- ``dump/``: what XLA wrote while compiling.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Private names of jax and their modules; jax 0.7.1 and 0.12.0.1 have all of them.
_NAMES = {
    "get_topology_desc": "jax.experimental.topologies",
    "hlo_to_stablehlo": "jaxlib._jax.mlir",
    "ir": "jaxlib.mlir",
    "make_ir_context": "jax._src.interpreters.mlir",
    "module_to_bytecode": "jax._src.interpreters.mlir",
    "CompileOptions": "jaxlib._jax",
    "DeviceAssignment": "jaxlib._jax",
    "DeviceList": "jaxlib._jax",
}


_TILINGS = "result_tilings"


class KnownError(Exception):
    """``kind``: "names" or "topology", as in ``result.json``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Names:
    """The private names of jax, imported at their first use."""

    def __getattr__(self, name: str) -> Any:
        path = f"{_NAMES[name]}.{name}"
        try:
            return pkgutil.resolve_name(path)
        except Exception as error:  # the type differs by release
            raise KnownError("names", f"{path}: {error}") from error


def program_file(request: dict) -> str:
    return "step.stablehlo" if request.get("partitioned") else "step.hlo"


def peak_memory() -> int:
    """Peak bytes of this process, 0 if unknown; Linux's ``ru_maxrss`` includes the parent before
    the fork.
    """
    with open("/proc/self/status") as status:
        peaks = (int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        return 1024 * next(peaks, 0)


def main(folder: Path, parent: int) -> None:
    watch = threading.Thread(target=_end_with_parent, args=(folder, parent), daemon=True)
    watch.start()
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",  # this is not a TPU host
        JAX_PLATFORMS="cpu",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else a lock file allows one process a machine
        # As text for the buffer assignment, of which libtpu writes no proto.
        XLA_FLAGS=f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_proto --xla_dump_hlo_as_text",
        LIBTPU_INIT_ARGS=request["arguments"],
        TPU_MIN_LOG_LEVEL="3",
    )
    os.environ.pop("TPU_MEGACORE", None)  # stated with the topology
    began = time.monotonic()
    try:
        result = compile_step(folder, request)
    except Exception as error:
        kind = error.kind if isinstance(error, KnownError) else type(error).__name__
        kind = "memory" if "RESOURCE_EXHAUSTED" in str(error) else kind
        result = {"error": str(error), "kind": kind, "seconds": time.monotonic() - began}
    result["host_memory"] = peak_memory()
    (folder / "result.json").write_text(json.dumps(result))


def _end_with_parent(folder: Path, parent: int) -> None:
    """Ends this process and removes the folder when the caller has ended."""
    while os.getppid() == parent:
        time.sleep(0.2)
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.02)  # the compiler may still write into it
    os._exit(1)


def compile_step(folder: Path, request: dict) -> dict:
    import numpy as np

    jax = Names()
    devices = _devices(jax, request)
    partitioned = request.get("partitioned")
    replicas, partitions = (1, len(devices)) if partitioned else (len(devices), 1)
    program = (folder / program_file(request)).read_bytes()
    if not partitioned:
        program = jax.hlo_to_stablehlo(program)
    options = jax.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, partitions
    if partitioned:
        build = options.executable_build_options
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = partitioned["shardy"]
        # An output without a sharding gets the one that it is computed in.
        build.allow_spmd_sharding_propagation_to_output = [True]
    ids = np.array([device.id for device in devices]).reshape(replicas, partitions)
    options.device_assignment = jax.DeviceAssignment.create(ids)
    ir, where = jax.ir, jax.DeviceList(tuple(devices))
    with jax.make_ir_context():
        module = ir.Module.parse(program)
        _donate(ir, module, set(request["donated"]))
        _leave_out_tilings(ir, module)
        for name, number in (("replicas", replicas), ("partitions", partitions)):
            count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
            module.operation.attributes[f"mhlo.num_{name}"] = count
        began = time.monotonic()
        compile = devices[0].client.compile
        try:
            executable = compile(module, where, options)
        except TypeError:  # jax < 0.8 accepts only bytes
            executable = compile(jax.module_to_bytecode(module), where, options)
    seconds = time.monotonic() - began
    memory = executable.get_compiled_memory_stats()
    scheduled = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    (folder / "scheduled.pb").write_bytes(scheduled)
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


def _devices(jax: Names, request: dict) -> list[Any]:
    describe = jax.get_topology_desc
    try:
        slice_ = describe(request["libtpu_name"], "tpu", **request["topology_options"])
    except Exception as error:  # the type differs by release
        raise KnownError("topology", str(error)) from error
    devices: list[Any] = sorted(slice_.devices, key=lambda device: device.id)
    if len(devices) != request["devices"]:
        message = f"expected {request['devices']} devices, it has {len(devices)}"
        raise KnownError("topology", message)
    return devices


def _leave_out_tilings(ir: Any, module: Any) -> None:
    """Removes empty tilings, which jaxlib 0.12 adds and libtpu 0.0.51 cannot read."""

    def leave_out(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and _TILINGS in attributes:
            if not any(len(ir.ArrayAttr(one)) for one in ir.ArrayAttr(attributes[_TILINGS])):
                del attributes[_TILINGS]
        return ir.WalkResult.ADVANCE

    module.operation.walk(leave_out)


def _donate(ir: Any, module: Any, donated: set[int]) -> None:
    """Marks the arguments whose buffers outputs may reuse; the compiler pairs them."""
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
    # Files beside this one would hide modules of the same name.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    main(Path(sys.argv[1]), int(sys.argv[2]))
