"""``Preemption``: saves the training when a machine is preempted."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch_xla.runtime as xr

from ..ranks.channel import Channel, open_channel
from ..ranks.errors import Preempted
from ..ranks.spawned import leave
from . import metadata_server

__all__ = ["Preempted", "Preemption"]

_SECONDS_BETWEEN_QUESTIONS = 5.0


class Preemption:
    """Notifies all ranks, at the same step, that a machine is being preempted.

    ::

        with xla_fsdp.Preemption() as preempted:
            for number, batch in enumerate(loader, start=1):
                ...  # a step
                if preempted():
                    xla_fsdp.save_checkpoint(folder, model, optimizer, step=number)
                    preempted.exit()  # the process ends with exit code 75

    Create one on every rank, and call it once in every step on every rank. If one process receives
    a signal, or one metadata server announces preemption or maintenance, the calls of all ranks
    return true at the same step. Without a notice a call uses neither device nor network.

    Exit code 75, ``EX_TEMPFAIL``, means "start the same command again".

    Args:
        grace: seconds from the notice to the end of the process, which then prints its stacks. A
            Spot VM has 30 seconds, a worker of torchrun 30, a Kubernetes pod its
            ``terminationGracePeriodSeconds``.
        signals: the signals that count as a notice.
        metadata_server: ``HOST`` or ``HOST:PORT`` that is queried every 5 seconds; ``""`` for none.
            The default is ``GCE_METADATA_HOST`` if it is set, else, on a TPU, Google's server.

    Attributes:
        reason: the notice, and its rank; ``None`` before there is one.

    Raises:
        ValueError: ``grace`` is not a positive number, a process cannot handle ``signals``, or
            ``metadata_server`` is no host.
        RuntimeError: the ranks have no store that they share.
    """

    def __init__(
        self,
        grace: float = 25.0,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        metadata_server: str | None = None,
    ) -> None:
        number = isinstance(grace, (int, float)) and not isinstance(grace, bool)
        if not number or not 0 < grace < math.inf:
            raise ValueError(f"grace must be a positive number of seconds, got {grace!r}")
        try:
            notices = [signal.Signals(each) for each in signals]
        except (TypeError, ValueError):
            notices = None
        if notices is None or {signal.SIGKILL, signal.SIGSTOP} & {*notices}:
            raise ValueError(
                "signals must be signals that a process can handle, such as (signal.SIGTERM,), got "
                f"{signals!r}"
            )
        host = metadata_server
        if host is None:
            google = "metadata.google.internal" if xr.device_type() == "TPU" else ""
            host = os.environ.get("GCE_METADATA_HOST", "").strip() or google
        if not isinstance(host, str) or set(host) & set("/ "):
            raise ValueError(
                "metadata_server (or GCE_METADATA_HOST) must be HOST or HOST:PORT, without http://,"
                f" or '' for none; got {host!r}"
            )
        self.reason: str | None = None
        self._grace = float(grace)
        self._over = threading.Event()
        self._noticed_at = 0.0
        channel = open_channel("preemption")
        self._rank = channel.rank
        self._agreement = _Agreement(channel, self._on_notice)
        request = self._agreement.request_stop
        self._end_listening = [_signals.listen(each, request) for each in notices]
        if host:
            self._start_thread("metadata", poll_metadata_server, host, request, self._over)

    def __call__(self) -> bool:
        """Whether to save and end now, equal on all ranks."""
        return self._agreement.reached()

    def exit(self) -> NoReturn:
        """Ends the rank.

        Raises:
            Preempted: with exit code 75; do not catch it.
            RuntimeError: no call has returned true yet.
        """
        if self.reason is None:
            raise RuntimeError(
                "Preemption.exit() was called without a notice of preemption. Call it only after "
                "preempted() has returned True"
            )
        seconds = time.monotonic() - self._noticed_at
        if self._rank == 0:
            _print_line(f"{self.reason}: saved and ended after {seconds:.1f} of {self._grace:g} s")
        self.close()
        raise Preempted(self.reason or "")

    def close(self) -> None:
        """Stops listening; signals have their earlier effect again."""
        self._over.set()
        for end in self._end_listening:
            end()
        self._agreement.close()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _on_notice(self, notice: str) -> None:
        if self._noticed_at:
            return
        self._noticed_at, self.reason = time.monotonic(), notice
        if self._rank == 0:
            _print_line(f"{notice}: saving at the next step, within {self._grace:g} s")
        self._start_thread("grace", self._end_in_time)

    def _start_thread(self, name: str, function: Callable[..., None], *args: Any) -> None:
        name = f"xla_fsdp-{name}-{self._rank}"
        threading.Thread(target=function, args=args, name=name, daemon=True).start()

    def _end_in_time(self) -> None:
        if self._over.wait(self._grace):
            return
        _print_line(
            f"{self.reason}: rank {self._rank} has not ended within {self._grace:g} s, so its "
            "process is ended now. An incomplete checkpoint is ignored. Its threads:"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        leave(self.reason or "")


def _print_line(text: str) -> None:
    # In one write: several ranks share the terminal.
    os.write(2, f"xla_fsdp.Preemption: {text}\n".encode())


class _Agreement:
    """Makes all ranks stop at the same step, although only one of them may get a notice.

    The rank with the notice writes it into the store. A thread of every rank polls the store, stops
    the rank's counter and writes the rank's next step. Rank 0 takes the largest one for all. A
    stopped rank never waits for a step of another: its collective could be waiting for this rank.
    """

    def __init__(self, channel: Channel, on_notice: Callable[[str], None]) -> None:
        self.notice: str | None = None
        self._channel, self._on_notice = channel, on_notice
        self._seconds = 1.0 if channel.distant else 0.05
        self._requested: str | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._passed = 0
        self._stopped = False
        self._last: int | None = None  # the step at which all stop
        self._decided = threading.Event()
        name = f"xla_fsdp-agreement-{channel.rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def request_stop(self, notice: str) -> None:
        """Thread-safe; does not wait."""
        self._requested = self._requested or notice
        self._wake.set()

    def reached(self) -> bool:
        """Counts one step; true from the step on at which all ranks stop."""
        with self._lock:
            if not self._stopped:
                self._passed += 1
                return False
        # Wakes regularly, so that Python can raise RankStopped here.
        while not self._decided.wait(0.5):
            if self._over.is_set():
                return False
        self._passed += 1
        return self._last is not None and self._passed >= self._last

    def close(self) -> None:
        self._over.set()
        self._wake.set()

    def _run(self) -> None:
        try:
            self._wait_for_notice()
            if self.notice is not None:
                self._on_notice(self.notice)
                self._agree_on_step()
        except RuntimeError as error:
            # The process that served the store has ended: this rank's notice is enough to end it.
            while not (self.notice or self._requested or self._over.is_set()):
                self._wake.wait()
                self._wake.clear()
            if not self._over.is_set():
                notice = self.notice or self._requested
                self._on_notice(f"{notice}; then the ranks' store was lost ({error!s:.100})")

    def _wait_for_notice(self) -> None:
        store = self._channel.store
        while not self._over.is_set():
            if self._requested is not None:
                store.compare_set("notice", "", f"{self._requested} on rank {self._channel.rank}")
            if store.check(["notice"]):
                self.notice = store.get("notice").decode()
                return
            self._wake.wait(self._seconds)
            self._wake.clear()

    def _agree_on_step(self) -> None:
        store, size = self._channel.store, self._channel.size
        with self._lock:
            self._stopped = True
            own = self._passed + 1
        store.set(f"step/{self._channel.rank}", str(own))
        if self._channel.rank == 0:
            keys = [f"step/{rank}" for rank in range(size)]
            if not self._wait_for(keys):
                return
            store.set("last", str(max(int(store.get(key)) for key in keys)))
        if self._wait_for(["last"]):
            self._last = int(store.get("last"))
            self._decided.set()

    def _wait_for(self, keys: list[str]) -> bool:
        while not self._channel.store.check(keys):
            if self._over.wait(self._seconds):
                return False
        return True


class _Signals:
    """Calls functions on a separate thread when this process receives a signal.

    The main thread, which runs Python's handlers, may wait in C++. ``faulthandler``'s handlers are
    in C, can be set on any thread, and write into a pipe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks = defaultdict[signal.Signals, list[Callable[[str], None]]](list)
        self._pipes: dict[signal.Signals, int] = {}

    def listen(self, number: signal.Signals, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls ``callback(name of the signal)``; returns a function that stops this."""
        with self._lock:
            callbacks = self._callbacks[number]
            callbacks.append(callback)
            if number not in self._pipes:
                self._pipes[number] = self._listen_for(number)

        def end() -> None:
            with self._lock:
                if callback not in callbacks:
                    return
                callbacks.remove(callback)
                if not callbacks:
                    faulthandler.unregister(number)
                    os.close(self._pipes.pop(number))  # makes the read return

        return end

    def _listen_for(self, number: signal.Signals) -> int:
        read, write = os.pipe()
        # A handler must not wait for the reader.
        os.set_blocking(write, False)
        # Chain only to a Python handler: the default one would end the process.
        chain = callable(signal.getsignal(number))
        faulthandler.register(number, file=write, all_threads=False, chain=chain)
        name = f"xla_fsdp-{number.name}"
        threading.Thread(target=self._run, args=(number, read), name=name, daemon=True).start()
        return write

    def _run(self, number: signal.Signals, read: int) -> None:
        try:
            while os.read(read, 65536):
                for callback in list(self._callbacks[number]):
                    callback(number.name)
        finally:
            os.close(read)


_signals = _Signals()


def poll_metadata_server(host: str, callback: Callable[[str], None], over: threading.Event) -> None:
    """Reports announcements that are new since the start, until ``over``.

    One that stands when a server without answers answers first is new.
    """
    known: dict[str, str | None] = {}
    pause = 0.0
    while not over.wait(pause):
        pause = _SECONDS_BETWEEN_QUESTIONS
        # Separately: one key's answer may never end.
        for key in metadata_server.KEYS:
            try:
                value = metadata_server.notice(host, key)
            except OSError:
                known.setdefault(key, None)
                continue
            if value is not None and value != known.get(key, value):
                callback(f"{key} {value}")
            known[key] = value
