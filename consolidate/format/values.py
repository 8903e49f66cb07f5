"""Small Python values as JSON and back, exactly: scheduler states, optimizer options, ``extra``.

What JSON has itself stays as it is. The rest is an object with the one key ``"$"``'s type and
``"of"``: ``(0.9, 0.95)`` is ``{"$": "tuple", "of": [0.9, 0.95]}``. Reading never executes anything.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidMetadataError, UnsupportedValueError
from .dtypes import DTYPES, dtype_name, tensor_bytes
from .fields import is_shape

MAX_TENSOR_BYTES = 1 << 20
# Deeper values could be written but not read, where the reader is called from deeper.
MAX_DEPTH = 64
# Of 4300 decimal digits, beyond which Python does not read a number.
_MAX_INT_BITS = 14_000
_TAG, _OF = "$", "of"
_FLOATS = ("inf", "-inf", "nan")


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """JSON for ``value``. ``where`` it stands, for messages: ``extra['epoch']``.

    Takes None, bool, int, float, str, bytes, list, tuple, set, dict, OrderedDict, Counter, numpy
    scalars and CPU or XLA tensors of up to 1 MiB, nested up to 64 deep.

    Raises:
        UnsupportedValueError: anything else.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(f"{where:.200}... is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not _is_unicode(value):
            raise UnsupportedValueError(f"{where} is {value!r:.80}, which UTF-8 cannot express")
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise UnsupportedValueError(f"{where} is an int of {value.bit_length()} bits")
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
        return _encode_mapping(value, where, depth)
    for kind, name in ((tuple, "tuple"), (set, "set")):
        if type(value) is kind:
            items = sorted(value, key=repr) if kind is set else value
            return _tagged(name, _encode_items(items, where, depth))
    if type(value) is list:
        return _encode_items(value, where, depth)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return encode(value.item(), where, depth + 1)
    raise UnsupportedValueError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot hold without executing code when it is read; make it of numbers, "
        "strings, tensors, lists and dicts, or leave it out"
    )


def decode(value: Any, label: str, depth: int = 0) -> Any:
    """The reverse of :func:`encode`.

    Raises:
        InvalidMetadataError: nothing that :func:`encode` wrote.
    """
    if depth > MAX_DEPTH:
        raise InvalidMetadataError(f"{label}: a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [decode(item, label, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, label, depth + 1) for key, item in value.items()}
    kind = value[_TAG]
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None or value.keys() != {_TAG, _OF}:
        raise InvalidMetadataError(f"{label}: a value of unknown kind {kind!r:.80}")
    try:
        return reader(value[_OF], label, depth + 1)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as error:
        raise InvalidMetadataError(
            f"{label}: not a value of kind {kind!r}: {str(error):.120}"
        ) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _encode_items(items: Iterable, where: str, depth: int) -> list:
    return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)]


def _encode_mapping(value: Mapping, where: str, depth: int) -> Any:
    kinds = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
    kind = kinds.get(type(value))
    if kind is None:
        raise UnsupportedValueError(
            f"{where} is of type {type(value).__qualname__}; make it a plain dict"
        )
    if kind == "dict" and all(
        type(key) is str and key != _TAG and _is_unicode(key) for key in value
    ):
        return {k: encode(item, f"{where}[{k!r}]", depth + 1) for k, item in value.items()}
    pairs = [
        [
            encode(key, f"a key of {where}", depth + 1),
            encode(item, f"{where}[{key!r}]", depth + 1),
        ]
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
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    data = base64.b64encode(tensor_bytes(flat)).decode()
    return {"dtype": dtype_name(value.dtype, where), "shape": list(value.shape), "data": data}


def _decode_tensor(of: Any, label: str, depth: int) -> torch.Tensor:
    dtype, shape = DTYPES[of["dtype"]], of["shape"]
    if not is_shape(shape):
        raise ValueError(f"shape {shape!r:.60}")
    data = _decode_bytes(of["data"], label, depth)
    if math.prod(shape) * dtype.itemsize != len(data) or of.keys() != {"dtype", "shape", "data"}:
        raise ValueError(f"{len(data)} bytes for shape {shape!r:.60}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _decode_bytes(of: Any, label: str, depth: int) -> bytes:
    return base64.b64decode(of, validate=True)


def _decode_float(of: Any, label: str, depth: int) -> float:
    if of not in _FLOATS:
        raise ValueError(f"{of!r:.40}")
    return float(of)  # every nan an object of its own: they can be keys


def _decode_pairs(of: Any, label: str, depth: int) -> dict[Any, Any]:
    if not all(isinstance(pair, list) for pair in _items(of)):
        raise TypeError("expected pairs")
    found = {decode(key, label, depth): decode(item, label, depth) for key, item in of}
    if len(found) != len(of):
        raise ValueError("a key stands twice")
    return found


def _decode_set(of: Any, label: str, depth: int) -> set:
    found = set(_decode_items(of, label, depth))
    if len(found) != len(of):
        raise ValueError("an item stands twice")
    return found


def _decode_items(of: Any, label: str, depth: int) -> list:
    return [decode(item, label, depth) for item in _items(of)]


def _items(of: Any) -> list:
    if not isinstance(of, list):
        raise TypeError(f"expected a list, found {type(of).__name__}")
    return of


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {_TAG: kind, _OF: of}


_READERS = {
    "float": _decode_float,
    "tensor": _decode_tensor,
    "bytes": _decode_bytes,
    "tuple": lambda of, label, depth: tuple(_decode_items(of, label, depth)),
    "set": _decode_set,
    "dict": _decode_pairs,
    "ordered_dict": lambda of, label, depth: OrderedDict(_decode_pairs(of, label, depth)),
    "counter": lambda of, label, depth: Counter(_decode_pairs(of, label, depth)),
}
