"""The interface of checkpoints that can be consolidated: ranges of tensors, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .format.manifest import Optimizer, Tensor


@dataclass(frozen=True)
class Origin:
    """Identifies a save.

    Attributes:
        save_id: equal only for saves with the same bytes.
        step: the step of the save, None if it is not recorded.
        world_size: the number of ranks that saved it.
    """

    save_id: str
    step: int | None
    world_size: int


class Source(Protocol):
    """One checkpoint. Opening it has checked that it is complete and consistent.

    Attributes:
        origin: identifies the save.
        label: name of the checkpoint in messages.
        found: text that tells the user which checkpoint was found.
        inputs: paths of its files, which must not be overwritten.
        order: every name in the order of the model's state_dict, with the first name of its tensor.
        parameters, buffers: descriptions of tensors by first name.
        extra_state: what ``get_extra_state`` of modules returned, by key; plain values.
        size: total bytes of its files.
        optimizer: description of the optimizer, None if the checkpoint has none.
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
            UnmatchedOptimizerError: it is not recorded which state belongs to which parameter.
        """

    def read_parameter(self, name: str, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Reads the elements ``begin <= i < end`` of the flattened parameter into ``out``.

        ``out`` must be contiguous and have the parameter's dtype. Returns ``out``.
        """

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Reads elements of an optimizer state of the parameter's shape, like
        :meth:`read_parameter`."""

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        """Reads a buffer with the values of ``rank``, or of rank 0 if there was no such rank."""

    def verify(self, progress: Callable[[int], None]) -> str:
        """Checks every byte and returns a text that says what was checked.

        ``progress`` is called with the number of bytes of each step.

        Raises:
            CheckpointError: a subclass of it; the message names the file.
        """
