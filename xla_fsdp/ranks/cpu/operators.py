"""Looks up the Python objects of torch's operators before the threads of ranks start.

torch does so without a lock: two ranks at the same time raise ``expected != self_interpreter``
("PyHandleCache.h") or crash.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = "aten::"
_TO_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)  # calls the mode first


class _OperatorReached(Exception):
    """Keeps the operator from running."""


class _LookUpMode(TorchDispatchMode):
    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        raise _OperatorReached


@functools.cache
def look_up_operators() -> None:
    """Once in a process (0.5 s)."""
    tensor = torch.ones(1, device="cpu")
    values = {
        "Tensor": tensor, "List[Tensor]": [tensor], "List[Optional[Tensor]]": [tensor], "int": 1,
        "SymInt": 1, "List[int]": [1], "float": 1.0, "List[float]": [1.0], "number": 1,
        "List[number]": [1], "bool": True, "List[bool]": [True], "str": "", "Device": tensor.device,
    }  # fmt: skip
    with _LookUpMode():
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith(_ATEN):
                continue
            packet, _, overload = name.removeprefix(_ATEN).partition(".")
            try:
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                needed = [a for a in operator._schema.arguments if not a.has_default_value()]
                given = {a.name: values.get(str(a.type)) for a in needed}
                args = [given.pop(a.name) for a in needed if not a.kwarg_only]
                operator.redispatch(_TO_MODES, *args, **given)
            except Exception:  # it requires other arguments
                continue
