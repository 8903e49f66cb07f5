"""Notices that this process's machine is being taken away: a signal, or the metadata server.

Python runs its signal handlers in the main thread, and lets only that one set them. Ranks are
threads, on TPU as well, and the main thread may wait in C++. So ``faulthandler``, whose handlers
are C and can be set by any thread, writes into a pipe that a thread of ours reads.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple

from . import metadata_server

_SECONDS_BETWEEN_QUESTIONS = 5.0
_SECONDS_AFTER_NO_ANSWER = 15.0


class _Watch(NamedTuple):
    told: Callable[[str], None]
    signals: tuple[signal.Signals, ...]
    host: str | None


class Notices:
    """Tells everybody who asked, once each, with a word for what was heard.

    One for a process, whose signals are its own. Its threads run while somebody listens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[_Watch] = []
        self._signals: dict[signal.Signals, _SignalPipe] = {}
        self._hosts: dict[str, _Poller] = {}

    def listen(
        self,
        told: Callable[[str], None],
        signals: tuple[signal.Signals, ...],
        host: str | None,
    ) -> Callable[[], None]:
        """Calls ``told(word)``, on a thread of its own; returns what ends that.

        Args:
            told: may be called more than once.
            signals: those that count as a notice.
            host: of the metadata server, if it is to be asked.
        """
        watch = _Watch(told, signals, host)
        with self._lock:
            self._listeners.append(watch)
            for number in signals:
                if number not in self._signals:
                    self._signals[number] = _SignalPipe(number, self._tell_signal)
            if host is not None and host not in self._hosts:
                self._hosts[host] = _Poller(host, self._tell_host)

        def end() -> None:
            with self._lock:
                if watch not in self._listeners:
                    return
                self._listeners.remove(watch)
                wanted = {number for other in self._listeners for number in other.signals}
                for number in [one for one in self._signals if one not in wanted]:
                    self._signals.pop(number).close()
                hosts = {other.host for other in self._listeners}
                for name in [one for one in self._hosts if one not in hosts]:
                    self._hosts.pop(name).close()

        return end

    def _tell_signal(self, number: signal.Signals) -> None:
        self._tell(number.name, lambda watch: number in watch.signals)

    def _tell_host(self, host: str, word: str) -> None:
        self._tell(word, lambda watch: watch.host == host)

    def _tell(self, word: str, concerns: Callable[[_Watch], bool]) -> None:
        with self._lock:
            listeners = [watch for watch in self._listeners if concerns(watch)]
        for watch in listeners:
            watch.told(word)


class _SignalPipe:
    """Reads what ``faulthandler`` writes when ``number`` arrives."""

    def __init__(self, number: signal.Signals, told: Callable[[signal.Signals], None]) -> None:
        self._number, self._told = number, told
        self._read, self._write = os.pipe()
        # What does not fit is dropped: a handler that waited would wait for ever.
        os.set_blocking(self._write, False)
        # Whoever handles it in Python goes on doing so. The default would end the process.
        chain = callable(signal.getsignal(number))
        faulthandler.register(number, file=self._write, all_threads=False, chain=chain)
        self._open = True
        self._thread = threading.Thread(
            target=self._run, name=f"xla_fsdp-{number.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        faulthandler.unregister(self._number)
        self._open = False
        os.close(self._write)  # ends the read

    def _run(self) -> None:
        try:
            while os.read(self._read, 65536):
                if self._open:
                    self._told(self._number)
        finally:
            os.close(self._read)


class _Poller:
    """Asks a metadata server now and then, for what was not announced when it began.

    A machine whose end was announced before is one that the job was started on all the same.
    """

    def __init__(self, host: str, told: Callable[[str, str], None]) -> None:
        self._host, self._told = host, told
        self._over = threading.Event()
        threading.Thread(target=self._run, name="xla_fsdp-metadata", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        known: dict[str, str | None] = {}
        pause = 0.0
        while not self._over.wait(pause):
            pause = _SECONDS_BETWEEN_QUESTIONS
            # Each by itself: a key whose answer never ends must not hide what the other one says.
            for key in metadata_server.KEYS:
                try:
                    value = metadata_server.notice(self._host, key)
                except OSError:  # no server, or one that is busy: asked again later
                    pause = _SECONDS_AFTER_NO_ANSWER
                    continue
                if value is not None and value != known.get(key, value):
                    self._told(self._host, f"{key} {value}")
                known[key] = value


# Of the process by nature, as its signals are.
of_this_process = Notices()
