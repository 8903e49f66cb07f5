"""Lower a peer's step in a separate process: ``python -m benchmarks.peers.PEER FOLDER``.

The platform of jax, and SPMD mode and the number of devices of torch_xla, must be set before these
are imported, and cannot be changed afterwards. ``FOLDER/request.json`` is the input; the child
writes ``FOLDER/step.stablehlo`` (bytecode) and ``FOLDER/step.json`` (everything else).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .sizes import KEPT, Sizes

ROOT = Path(__file__).resolve().parents[2]
BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Request:
    """What to lower. ``way``: what is saved for the backward, see ``jax_fsdp.py``."""

    devices: int
    sizes: Sizes
    way: str = KEPT

    @classmethod
    def read(cls, folder: Path) -> Request:
        fields = json.loads((folder / "request.json").read_text())
        return cls(**{**fields, "sizes": Sizes(**fields["sizes"])})


def write_answer(
    folder: Path, module: Any, shardy: bool, arguments: list[str], donated: Mapping[int, int]
) -> None:
    """Write an MLIR ``module`` and the other fields of PartitionedProgram to ``folder``."""
    from jax._src.interpreters import mlir

    (folder / "step.stablehlo").write_bytes(mlir.module_to_bytecode(module))
    plain = module.operation.get_asm(
        enable_debug_info=False
    )  # without names of files and line numbers
    answer = {
        "fingerprint": hashlib.sha256(plain.encode()).hexdigest(),
        "shardy": shardy,
        "arguments": arguments,
        "donated": dict(donated),
    }
    (folder / "step.json").write_text(json.dumps(answer))


def lower(peer: str, request: Request):
    """The step of ``peer``, a module of this package, as a ``PartitionedProgram``.

    Raises:
        RuntimeError: the child failed; the message ends with its error.
    """
    from xla_fsdp.planning.foreign import PartitionedProgram

    with tempfile.TemporaryDirectory(prefix="peer_") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(asdict(request)))
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        child = subprocess.run(
            [sys.executable, "-m", f"{__package__}.{peer}", name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if child.returncode or not (folder / "step.json").exists():
            tail = "\n".join(child.stderr.strip().splitlines()[-15:])
            raise RuntimeError(f"lowering {peer} ended with status {child.returncode}:\n{tail}")
        answer = json.loads((folder / "step.json").read_text())
        return PartitionedProgram(
            stablehlo=(folder / "step.stablehlo").read_bytes(),
            fingerprint=answer["fingerprint"],
            shardy=answer["shardy"],
            devices=request.devices,
            arguments=tuple(answer["arguments"]),
            donated={int(number): output for number, output in answer["donated"].items()},
            elements=request.sizes.elements,
            itemsize=BFLOAT16_BYTES,
            model_flops=request.sizes.model_flops,
        )
