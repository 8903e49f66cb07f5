"""``Preemption``: a machine that is taken away does not take what was trained along."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from ..ranks.channel import open_channel
from ..ranks.errors import Preempted
from ..ranks.spawned import leave
from .agreement import Agreement
from .metadata_server import metadata_host
from .notices import of_this_process

__all__ = ["Preempted", "Preemption"]


class Preemption:
    """Tells all ranks, at the same step, that the machine is being taken away.

    ::

        with xla_fsdp.Preemption() as preempted:
            for number, batch in enumerate(loader, start=1):
                ...  # a step
                if preempted():
                    xla_fsdp.save_checkpoint(folder, model, optimizer, step=number)
                    preempted.exit()  # the process ends with exit code 75

    Make one on every rank, and call it once a step on every rank. SIGTERM in one process, or a word
    of one machine's metadata server, is enough: all ranks then hear of it at the same step. While
    nobody has heard anything a call counts to one, and neither the device nor the network is asked.

    Exit code 75, ``EX_TEMPFAIL``, means "start the same command again"; those of ``examples/pod``
    do. A process that has not ended ``grace`` seconds after the notice says on standard error where
    its threads are and ends with that code all the same: it goes on from an earlier checkpoint.

    Args:
        grace: seconds from the notice to the end of the process. Of a Spot VM 30 are left, of a
            worker of torchrun 30, of a Kubernetes pod its ``terminationGracePeriodSeconds``.
        signals: those that count as a notice.
        metadata_server: ``HOST`` or ``HOST:PORT`` that is asked for maintenance events and
            preemption, every 5 seconds; ``""``: none. By default ``GCE_METADATA_HOST`` if set, and
            else, on a TPU, Google's.

    Attributes:
        reason: what was heard, and on which rank; ``None`` before.

    Raises:
        ValueError: ``grace`` is no positive number.
        RuntimeError: the ranks cannot tell each other anything: see the message.
    """

    def __init__(
        self,
        grace: float = 25.0,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        metadata_server: str | None = None,
    ) -> None:
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not grace > 0:
            raise ValueError(f"grace must be a positive number of seconds, got {grace!r}")
        self.reason: str | None = None
        self._grace = float(grace)
        self._over = threading.Event()
        self._heard_at = 0.0
        channel = open_channel("preemption")
        self._rank = channel.rank
        self._agreement = Agreement(channel, self._heard)
        host = metadata_host() if metadata_server is None else metadata_server or None
        self._end_listening = of_this_process.listen(
            self._agreement.say, tuple(signal.Signals(number) for number in signals), host
        )

    def __call__(self) -> bool:
        """Whether to save and end now. Call it once a step, on every rank; true on all at once."""
        return self._agreement.reached()

    def exit(self) -> NoReturn:
        """Ends the rank.

        Raises:
            Preempted: with exit code 75; let it pass.
            RuntimeError: nobody has heard anything: only call it where the object was true.
        """
        if self.reason is None:
            raise RuntimeError(
                "Preemption.exit() ends a rank that is preempted, and nothing was heard; call it "
                "only where preempted() has returned True"
            )
        seconds = time.monotonic() - self._heard_at
        if self._rank == 0:
            _say(f"{self.reason}: saved and ended after {seconds:.1f} of {self._grace:g} s")
        self.close()
        raise Preempted(self.reason or "")

    def close(self) -> None:
        """Hears nothing any more; a signal does again what it did before."""
        self._over.set()
        self._end_listening()
        self._agreement.close()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _heard(self, word: str) -> None:
        if self._heard_at:
            return
        self._heard_at, self.reason = time.monotonic(), word
        if self._rank == 0:
            _say(f"{word}: saving at the next step, within {self._grace:g} s")
        name = f"xla_fsdp-grace-{self._rank}"
        threading.Thread(target=self._end_in_time, name=name, daemon=True).start()

    def _end_in_time(self) -> None:
        if self._over.wait(self._grace):
            return
        _say(
            f"{self.reason}: rank {self._rank} has not ended within {self._grace:g} s and is "
            "ended; a checkpoint that is not complete does not count. Its threads:"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        leave(self.reason or "")


def _say(text: str) -> None:
    # In one piece: ranks write to the same terminal.
    os.write(2, f"xla_fsdp.Preemption: {text}\n".encode())
