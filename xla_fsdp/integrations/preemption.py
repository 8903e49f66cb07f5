"""``PreemptionCallback``: the Trainer saves a checkpoint and exits when it is preempted."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl

from ..pods.preemption import Preemption


class PreemptionCallback(TrainerCallback):
    """Pass it as ``Trainer(..., callbacks=[PreemptionCallback()])`` on each rank. After the step at
    which all ranks know of the preemption, the Trainer saves a checkpoint, and exits with code 75.

    Args:
        grace: see :class:`xla_fsdp.Preemption`, also for the errors.
    """

    def __init__(self, grace: float = 25.0) -> None:
        self._grace = grace
        self._preempted: Preemption | None = None
        self._leaving = False

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self._preempted is not None:
            self._preempted.close()
        self._preempted, self._leaving = Preemption(self._grace), False

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        assert self._preempted is not None  # training has begun
        if self._preempted():
            self._leaving = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        preempted, self._preempted = self._preempted, None
        if preempted is None:
            return
        if self._leaving:
            preempted.exit()
        preempted.close()
