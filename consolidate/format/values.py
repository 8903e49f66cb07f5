"""Converts small Python values to JSON, as ``consolidate/README.md`` defines, and back."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import InvalidMetadataError, UnsupportedValueError
from .dtypes import DTYPES, dtype_name, flatten_on_host, is_dense, tensor_bytes
from .strict import is_shape

MAX_TENSOR_BYTES = 1 << 20
# Reading deeper values could reach Python's recursion limit.
MAX_DEPTH = 64
# Python reads integers of at most 4300 decimal digits.
_MAX_INT_BITS = 14_000
_TAG, _OF = "$", "of"
_FLOATS = ("inf", "-inf", "nan")
_ITEMS: dict[str, Callable] = {"tuple": tuple, "set": set}
_MAPPINGS: dict[str, Callable] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_KINDS = ["float", "bytes", "tensor", *_ITEMS, *_MAPPINGS]


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Converts ``value`` to JSON. ``where`` names the value in messages: ``extra['epoch']``.

    ``value`` may be None, bool, int, float, str, bytes, list, tuple, set, dict, OrderedDict,
    Counter, a numpy scalar, or a CPU or XLA tensor of up to 1 MiB, nested up to 64 levels deep.

    Raises:
        UnsupportedValueError: ``value`` has another type, or is too large or too deep.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(
            f"{where:.200}... is nested more than {MAX_DEPTH} levels deep. Use a flatter value."
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not _is_unicode(str(value)):
            raise UnsupportedValueError(f"{where} is {value!r:.80}, which UTF-8 cannot encode")
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise UnsupportedValueError(
                f"{where} is an int of {value.bit_length()} bits, at most {_MAX_INT_BITS} can be "
                "stored"
            )
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
    if type(value) in (tuple, set, list):
        items = sorted(value, key=repr) if type(value) is set else value
        encoded = [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)]
        return encoded if type(value) is list else _tagged(type(value).__name__, encoded)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return encode(value.item(), where, depth + 1)
    raise UnsupportedValueError(
        f"{where} has the type {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint cannot store: reading it would run code. Convert it to numbers, strings, "
        "tensors, lists and dicts, or leave it out."
    )


def decode(value: Any, label: str, depth: int = 0) -> Any:
    """Converts a result of :func:`encode` back. Raises InvalidMetadataError if it is none."""
    if depth > MAX_DEPTH:
        raise InvalidMetadataError(f"{label}: a value is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [decode(item, label, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, label, depth + 1) for key, item in value.items()}
    kind = value[_TAG]
    if kind not in _KINDS or value.keys() != {_TAG, _OF}:
        raise InvalidMetadataError(f"{label}: a value of unknown kind {kind!r:.80}")
    try:
        return _decode_tagged(kind, value[_OF], label, depth + 1)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as error:
        raise InvalidMetadataError(
            f"{label}: not a value of kind {kind!r}: {str(error):.120}"
        ) from None


def _is_unicode(value: Any) -> bool:
    """Whether it is a string without half of a surrogate pair."""
    return type(value) is str and not re.search("[\ud800-\udfff]", value)


def _encode_mapping(value: Mapping, where: str, depth: int) -> Any:
    kind = next((kind for kind, each in _MAPPINGS.items() if type(value) is each), None)
    if kind is None:
        raise UnsupportedValueError(
            f"{where} has the type {type(value).__qualname__}, which cannot be stored. Convert it "
            "to a plain dict."
        )
    items = [encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()]
    if kind == "dict" and all(_is_unicode(key) and key != _TAG for key in value):
        return dict(zip(value, items, strict=True))
    keys = [encode(key, f"a key of {where}", depth + 1) for key in value]
    return _tagged(kind, [list(pair) for pair in zip(keys, items, strict=True)])


def _encode_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    size = value.numel() * value.element_size()
    if size > MAX_TENSOR_BYTES or not is_dense(value):
        raise UnsupportedValueError(
            f"{where} is a tensor of {size} bytes, {value.layout} on {value.device}. Only dense "
            f"tensors of up to {MAX_TENSOR_BYTES} bytes can be stored here. Make larger tensors "
            "parameters or buffers of the model."
        )
    data = base64.b64encode(tensor_bytes(flatten_on_host(value))).decode()
    return {"dtype": dtype_name(value.dtype, where), "shape": list(value.shape), "data": data}


def _decode_tagged(kind: Any, of: Any, label: str, depth: int) -> Any:
    if kind == "float":
        if of not in _FLOATS:
            raise ValueError(f"{of!r:.40} is not one of {', '.join(_FLOATS)}")
        return float(of)  # each nan is a new object: dicts may have several as keys
    if kind == "bytes":
        return base64.b64decode(of, validate=True)
    if kind == "tensor":
        dtype, shape, data = DTYPES[of["dtype"]], of["shape"], of["data"]
        data = base64.b64decode(data, validate=True)
        if not is_shape(shape):
            raise ValueError(f"{shape!r:.60} is not a shape")
        if math.prod(shape) * dtype.itemsize != len(data) or len(of) != 3:
            raise ValueError(f"{len(data)} bytes do not match shape {shape!r:.60}")
        flat = (
            torch.frombuffer(bytearray(data), dtype=dtype)
            if data
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        return flat.reshape(shape)
    if not isinstance(of, list):
        raise TypeError(f"expected a list, found {type(of).__name__}")
    if kind in _ITEMS:
        found = _ITEMS[kind](decode(item, label, depth) for item in of)
    elif all(isinstance(pair, list) for pair in of):
        found = _MAPPINGS[kind]({decode(k, label, depth): decode(v, label, depth) for k, v in of})
    else:
        raise TypeError("expected pairs")
    if len(found) != len(of):
        raise ValueError("an item or a key occurs twice")
    return found


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {_TAG: kind, _OF: of}
