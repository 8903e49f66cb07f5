"""What communication hooks remember of equal blocks that are traced once, in a loop.

It is one tensor for all blocks, ``(depth, ...)``. An iteration reads its block's row of it, and may
write the row, which the next run of the loop finds there. Nothing else that a hook makes may
outlive the trace: inside of the loop tensors stand for values that no program outside of it has.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import xlac
from ..tree import tensors_in
from .freeing import fill_
from .trace_cache import placeholder, twin


@dataclass(eq=False)
class Row:
    """One block's part of ``kept``, ``(depth, ...)``.

    Attributes:
        argument: what stands for it in the trace.
        value: what it is by now.
        written: whether the hook changed it.
    """

    kept: torch.Tensor
    argument: torch.Tensor
    value: torch.Tensor
    written: bool = False


class BlockMemory:
    """Lifetime: the trace of one loop.

    Args:
        depth: blocks.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._rows: dict[int, Row] = {}  # by identity of what is kept, which they keep alive
        self._seen = _Seen()

    @property
    def rows(self) -> list[Row]:
        """In the order in which they were asked for."""
        return list(self._rows.values())

    def recall(self, kept: torch.Tensor) -> torch.Tensor:
        """The row of ``kept`` that is the block's of the iteration, as it is by now."""
        return self._row(kept).value

    def remember(self, kept: torch.Tensor, value: torch.Tensor) -> None:
        """Makes it ``value``."""
        row = self._row(kept)
        if value.shape != row.value.shape:
            raise ValueError(
                f"of a tensor of shape {tuple(kept.shape)} one block has {tuple(row.value.shape)}; "
                f"got {tuple(value.shape)} to remember"
            )
        row.value, row.written = value.to(kept.dtype), True

    def _row(self, kept: torch.Tensor) -> Row:
        row = self._rows.get(id(kept))
        if row is None:
            if kept.dim() == 0 or kept.shape[0] != self.depth:
                raise ValueError(
                    f"what a hook keeps of {self.depth} scanned blocks must have a row for each, "
                    f"shape ({self.depth}, ...); got {tuple(kept.shape)}. bucket.block_names has "
                    "as many"
                )
            argument = placeholder(kept.shape[1:], kept.dtype)
            row = self._rows[id(kept)] = Row(kept, argument, twin(argument))
        return row

    def clear(self) -> None:
        """Forgets all rows, which have no value outside of the trace."""
        self._rows.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, a hook is called."""
        with self._seen:
            yield

    def require_nothing_left(self, arguments: Sequence[torch.Tensor]) -> None:
        """After the trace: raises RuntimeError if a hook kept something made of ``arguments``.

        Whatever it is has no value: torch_xla would end the process where it asked for one. So it
        is replaced by zeros.
        """
        for row in self._rows.values():
            row.value = row.argument
        if self._seen.made_of(arguments):
            gc.collect()  # perhaps only cycles of references
        left = self._seen.made_of(arguments)
        if not left:
            return
        shapes = [tuple(tensor.shape) for tensor in left]
        for tensor in left:
            # What a view is of stays as long as the view does.
            for one in (tensor, tensor._base):
                if one is not None:
                    fill_([one], [torch.zeros_like(one)])
        raise RuntimeError(
            f"a communication hook kept, or changed in place, tensors of shapes {shapes} that hold "
            "gradients of scanned blocks: these are traced once, in a loop, and outside of it "
            "there is no such value. Keep one tensor for all blocks, (len(bucket.block_names), "
            "...), read it with bucket.recall(kept) and change it with bucket.remember(kept, "
            "value); or wrap the blocks singly"
        )


class _Seen(TorchFunctionMode):
    """Notes the tensors that a function makes and uses."""

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

    def made_of(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are still there, and are computed from ``arguments``."""
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
    """Numbers of the buffers that ``tensors`` are computed from."""
    return xlac.device_data_of(list(tensors))[0]
