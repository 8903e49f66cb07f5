"""``Preemption``: a machine that is taken away does not take what was trained along."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, NoReturn

from ..ranks.channel import Channel, open_channel
from ..ranks.errors import Preempted
from ..ranks.spawned import leave
from . import metadata_server
from .metadata_server import metadata_host

__all__ = ["Preempted", "Preemption"]

_SECONDS_BETWEEN_QUESTIONS = 5.0
_SECONDS_AFTER_NO_ANSWER = 15.0


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
        self._agreement = _Agreement(channel, self._heard)
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


class _Agreement:
    """How all ranks stop at the same step, though only one of them may know that they have to.

    Every rank makes one. Each counts its steps, and nothing is asked or sent while nobody has
    anything to say. Then

    1. who knows leaves a word in the store;
    2. every rank's own thread, which looks there now and then, promises: "I have gone past n steps,
       and go past no more until I hear from you"; its number is n + 1;
    3. rank 0 takes the largest number, and that is the step at which all stop.

    A rank that has promised may wait a moment before its next step, for threads that look now and
    then, never for another rank's step: programs hold the ranks together, and one that waited for a
    step could be what that step waits for.

    Args:
        channel: of all ranks, for this alone.
        heard: called with the word, on a thread of this object, once there is one.

    Attributes:
        word: what the ranks stop for; ``None`` while nobody has said anything.
    """

    def __init__(self, channel: Channel, heard: Callable[[str], None]) -> None:
        self.word: str | None = None
        self._channel, self._heard = channel, heard
        self._seconds = 1.0 if channel.distant else 0.05
        self._said: str | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._passed = 0  # steps
        self._promised = False
        self._last: int | None = None  # the step at which all stop
        self._decided = threading.Event()
        name = f"xla_fsdp-agreement-{channel.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def say(self, word: str) -> None:
        """All ranks are to stop. From any thread; returns at once."""
        self._said = self._said or word
        self._wake.set()

    def reached(self) -> bool:
        """Counts one step; true at the one at which all ranks stop, and from then on.

        Waits only when a word was said and the step is not settled, for as long as that takes.
        """
        with self._lock:
            if not self._promised:
                self._passed += 1
                return False
        # Now and then awake: a rank that is to end because another failed is told so between two
        # operations of Python.
        while not self._decided.wait(0.5):
            if self._over.is_set():
                return False
        self._passed += 1
        return self._last is not None and self._passed >= self._last

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._wake.set()

    def _run(self) -> None:
        try:
            self._wait_for_a_word()
            if self.word is not None:
                self._heard(self.word)
                self._settle()
        except RuntimeError as error:
            # The store is gone, with the process that served it: what ends the others ends this.
            if not self._over.is_set() and self.word is not None:
                self._heard(f"{self.word}; then the ranks' store was lost ({error!s:.100})")

    def _wait_for_a_word(self) -> None:
        store = self._channel.store
        while not self._over.is_set():
            if self._said is not None:
                store.compare_set("word", "", f"{self._said} on rank {self._channel.rank}")
            if store.check(["word"]):
                self.word = store.get("word").decode()
                return
            self._wake.wait(self._seconds)
            self._wake.clear()

    def _settle(self) -> None:
        store, size = self._channel.store, self._channel.size
        with self._lock:
            self._promised = True
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


class _Watch(NamedTuple):
    told: Callable[[str], None]
    signals: tuple[signal.Signals, ...]
    host: str | None


class _Notices:
    """Tells everybody who asked, once each, that this process's machine is being taken away: with a
    word for the signal, or for what the metadata server said.

    One for a process, whose signals are its own. Its threads run while somebody listens.

    Python runs its signal handlers in the main thread, and lets only that one set them. Ranks are
    threads, on TPU as well, and the main thread may wait in C++. So ``faulthandler``, whose
    handlers are C and can be set by any thread, writes into a pipe that a thread of ours reads.
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
of_this_process = _Notices()
