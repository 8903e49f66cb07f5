"""What is consolidated, whatever it lies in: tensors by name, any range of elements of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .format.manifest import Optimizer, Tensor


@dataclass(frozen=True)
class Origin:
    """Which save this is. save_id: equal only for the same bytes; step: None if not recorded."""

    save_id: str
    step: int | None
    world_size: int


class Source(Protocol):
    """One checkpoint. Opening one has checked that it is complete and consistent.

    Attributes:
        origin: which save it is.
        label: how to call it in messages.
        found: what there is, for whoever asked for it.
        inputs: paths that must not be written to.
        order: every name in the order of the model's state_dict, with the first name of its tensor.
        parameters, buffers: by first name.
        extra_state: what modules' ``get_extra_state`` returned, by key; plain values.
        size: bytes of its files.
        optimizer: None if there is none.
    """

    origin: Origin
    label: str
    found: str
    inputs: list[str]
    order: list[tuple[str, str]]

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def extra_state(self) -> Mapping[str, Any]: ...

    @property
    def size(self) -> int: ...

    @property
    def optimizer(self) -> Optimizer | None:
        """
        Raises:
            UnmatchedOptimizerError: there is one, but whose state is whose is not recorded.
        """

    def read_parameter(self, name: str, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Puts the elements ``begin .. end``, flattened, into ``out``, contiguous and of the
        parameter's dtype, and returns it."""

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        """The same of a tensor of the parameter's shape that the optimizer keeps."""

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        """A whole buffer as ``rank`` had it; as rank 0 had it if there was no such rank."""

    def verify(self, progress: Callable[[int], None]) -> str:
        """Looks at every byte, telling ``progress`` how many at a time; says what was checked.

        Raises:
            CheckpointError: one of its subclasses, naming the file.
        """
