"""Small Python values as JSON and back, exactly: scheduler states, optimizer options, ``extra``.

What JSON has itself stays as it is. The rest is an object with the one key ``"$"``'s type and
``"of"``: ``(0.9, 0.95)`` is ``{"$": "tuple", "of": [0.9, 0.95]}``. Reading never executes anything.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidMetadataError, UnsupportedValueError
from .dtypes import DTYPES, dtype_name, tensor_bytes

MAX_TENSOR_BYTES = 1 << 20
_TAG, _OF = "$", "of"
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(value: Any, where: str) -> Any:
    """JSON for ``value``. ``where`` it stands, for messages: ``extra['epoch']``.

    Takes None, bool, int, float, str, bytes, list, tuple, set, dict, OrderedDict, Counter, numpy
    scalars and CPU or XLA tensors of up to 1 MiB, nested at will.

    Raises:
        UnsupportedValueError: anything else.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        return _tagged("float", "nan" if math.isnan(value) else str(value))
    if isinstance(value, torch.Tensor):
        return _tagged("tensor", _encode_tensor(value, where))
    if isinstance(value, bytes):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    for kind, name in ((tuple, "tuple"), (set, "set")):
        if type(value) is kind:
            items = sorted(value, key=repr) if kind is set else value
            return _tagged(name, [encode(item, f"{where}[{i}]") for i, item in enumerate(items)])
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return encode(value.item(), where)
    raise UnsupportedValueError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot hold without executing code when it is read; make it of numbers, "
        "strings, tensors, lists and dicts, or leave it out"
    )


def decode(value: Any, label: str) -> Any:
    """The reverse of :func:`encode`.

    Raises:
        InvalidMetadataError: nothing that :func:`encode` wrote.
    """
    if isinstance(value, list):
        return [decode(item, label) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, label) for key, item in value.items()}
    kind = value[_TAG]
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None or value.keys() != {_TAG, _OF}:
        raise InvalidMetadataError(f"{label}: a value of unknown kind {kind!r:.80}")
    try:
        return reader(value[_OF], label)
    except (TypeError, ValueError, KeyError, binascii.Error) as error:
        raise InvalidMetadataError(
            f"{label}: not a value of kind {kind!r}: {str(error):.120}"
        ) from None


def _encode_mapping(value: Mapping, where: str) -> Any:
    kinds = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
    kind = kinds.get(type(value))
    if kind is None:
        raise UnsupportedValueError(
            f"{where} is of type {type(value).__qualname__}; make it a plain dict"
        )
    if kind == "dict" and all(type(key) is str and key != _TAG for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return _tagged(kind, pairs)


def _encode_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    size = value.numel() * value.element_size()
    if size > MAX_TENSOR_BYTES or value.layout is not torch.strided:
        raise UnsupportedValueError(
            f"{where} is a tensor of {size} bytes; up to {MAX_TENSOR_BYTES} in strided layout "
            "can be stored here: make larger ones parameters or buffers of the model"
        )
    data = base64.b64encode(tensor_bytes(value.detach().cpu().reshape(-1))).decode()
    return {"dtype": dtype_name(value.dtype, where), "shape": list(value.shape), "data": data}


def _decode_tensor(of: Any, label: str) -> torch.Tensor:
    dtype, shape = DTYPES[of["dtype"]], of["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r:.60}")
    data = _decode_bytes(of["data"], label)
    if math.prod(shape) * dtype.itemsize != len(data) or of.keys() != {"dtype", "shape", "data"}:
        raise ValueError(f"{len(data)} bytes for shape {shape!r:.60}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _decode_bytes(of: Any, label: str) -> bytes:
    return base64.b64decode(of, validate=True)


def _decode_pairs(of: Any, label: str) -> list[tuple[Any, Any]]:
    return [(decode(key, label), decode(item, label)) for key, item in _items(of)]


def _decode_items(of: Any, label: str) -> list:
    return [decode(item, label) for item in _items(of)]


def _items(of: Any) -> list:
    if not isinstance(of, list):
        raise TypeError(f"expected a list, found {type(of).__name__}")
    return of


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {_TAG: kind, _OF: of}


_READERS = {
    "float": lambda of, label: _FLOATS[of],
    "tensor": _decode_tensor,
    "bytes": _decode_bytes,
    "tuple": lambda of, label: tuple(_decode_items(of, label)),
    "set": lambda of, label: set(_decode_items(of, label)),
    "dict": lambda of, label: dict(_decode_pairs(of, label)),
    "ordered_dict": lambda of, label: OrderedDict(_decode_pairs(of, label)),
    "counter": lambda of, label: Counter(dict(_decode_pairs(of, label))),
}
