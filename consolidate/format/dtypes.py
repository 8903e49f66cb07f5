"""Names of dtypes in safetensors files, and access to the bytes of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedValueError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
# torch copies more than twice this number of elements with several threads.
_SERIAL = 1 << 14
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The safetensors name (``"F32"``). Raises UnsupportedValueError if there is none."""
    if dtype not in _NAMES:
        raise UnsupportedValueError(
            f"{where}: {dtype} cannot be stored in a safetensors file. Use another dtype."
        )
    return _NAMES[dtype]


def is_dense(value: Any) -> bool:
    """Whether ``value`` is a strided tensor with values: not quantized, not on the meta device."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    return value.layout is torch.strided and not value.is_quantized


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous one-dimensional CPU tensor, not copied."""
    return tensor.detach().view(torch.uint8).numpy().data


def flatten_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, one-dimensional and contiguous on the CPU. Copied if necessary."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()


def copy_into(out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Fills ``out`` with ``values``, cast to its dtype. Returns ``out``."""
    # Stay in this thread: torch's thread pool would busy-wait on the cores that read.
    step = _SERIAL if out.is_cpu else max(len(values), 1)
    for begin in range(0, len(values), step):
        out[begin : begin + step].copy_(values[begin : begin + step])
    return out
