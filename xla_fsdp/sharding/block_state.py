"""State that a communication hook stores for scanned blocks, which are traced once in a loop.

The state is one tensor for all blocks, ``(depth, ...)``. An iteration reads the row of its block
and may write it; the next run of the loop finds the new row. No other tensor that a hook makes may
outlive the trace: inside the loop tensors are symbolic, and have no value outside of it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import xlac
from ..tree import tensors_in
from .freeing import fill_
from .trace_cache import placeholder, separate_copy


@dataclass(eq=False)
class Row:
    """One block's row of a state tensor ``kept``, ``(depth, ...)``.

    Attributes:
        argument: the tensor that represents the row in the trace.
        value: the current value of the row.
        written: whether the hook changed it.
    """

    kept: torch.Tensor
    argument: torch.Tensor
    value: torch.Tensor
    written: bool = False


class BlockState:
    """Hook state during the trace of one loop.

    Args:
        depth: the number of blocks.

    Attributes:
        seen: a context that records the tensors that a hook makes and uses.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._rows: dict[int, Row] = {}  # by the id of the state tensor, which the row keeps alive
        self.seen = _TensorRecorder()

    @property
    def rows(self) -> list[Row]:
        """In the order of the first ``recall`` of each."""
        return list(self._rows.values())

    def recall(self, kept: torch.Tensor) -> torch.Tensor:
        """The current value of the row of ``kept`` that belongs to the iteration's block."""
        return self._row(kept).value

    def remember(self, kept: torch.Tensor, value: torch.Tensor) -> None:
        """Sets that row to ``value``."""
        row = self._row(kept)
        if value.shape != row.value.shape:
            raise ValueError(
                f"bucket.remember got a value of shape {tuple(value.shape)}, but a block's row of "
                f"a tensor of shape {tuple(kept.shape)} has shape {tuple(row.value.shape)}. Pass a "
                "value of the row's shape"
            )
        row.value, row.written = value.to(kept.dtype), True

    def _row(self, kept: torch.Tensor) -> Row:
        row = self._rows.get(id(kept))
        if row is None:
            if kept.dim() == 0 or kept.shape[0] != self.depth:
                raise ValueError(
                    f"bucket.recall got a tensor of shape {tuple(kept.shape)}, but these are "
                    f"{self.depth} scanned blocks. Pass a tensor with one row for each block, of "
                    f"shape ({self.depth}, ...); len(bucket.block_names) is the number of blocks"
                )
            argument = placeholder(kept.shape[1:], kept.dtype)
            row = self._rows[id(kept)] = Row(kept, argument, separate_copy(argument))
        return row

    def clear(self) -> None:
        """Forgets all rows: they have no values outside of the trace."""
        self._rows.clear()

    def require_no_leaked_tensors(self, arguments: Sequence[torch.Tensor]) -> None:
        """After the trace: raises RuntimeError if a hook stored a tensor made from ``arguments``.

        Such a tensor has no value, and torch_xla would end the process when it is read. So it is
        replaced by zeros before the error.
        """
        for row in self._rows.values():
            row.value = row.argument
        if self.seen.computed_from(arguments):
            gc.collect()  # perhaps only reference cycles keep them alive
        left = self.seen.computed_from(arguments)
        if not left:
            return
        shapes = [tuple(tensor.shape) for tensor in left]
        for tensor in left:
            # The base of a view lives as long as the view.
            for one in (tensor, tensor._base):
                if one is not None:
                    fill_([one], [torch.zeros_like(one)])
        raise RuntimeError(
            f"a communication hook stored, or changed in place, tensors of shapes {shapes} that "
            "contain gradients of scanned blocks. The blocks are traced once, in a loop, and these "
            "tensors have no value outside of it. Store one tensor for all blocks, of shape "
            "(len(bucket.block_names), ...), read it with bucket.recall(kept) and change it with "
            "bucket.remember(kept, value); or wrap each block separately"
        )


class _TensorRecorder(TorchFunctionMode):
    """Records the tensors that a function makes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, made)):
            self._tensors[id(tensor)] = weakref.ref(tensor)
        return made

    def computed_from(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The recorded tensors that are still alive and are computed from ``arguments``."""
        data, own = set(_data_of(arguments)), {id(argument) for argument in arguments}
        found = []
        for number, ref in self._tensors.items():
            tensor = ref()
            if tensor is None or number in own or tensor.device.type != "xla":
                continue
            if data.intersection(_data_of([tensor])):
                found.append(tensor)
        return found


def _data_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Ids of the buffers that ``tensors`` are computed from."""
    return xlac.device_data_of(list(tensors))[0]
