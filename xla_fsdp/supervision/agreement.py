"""How all ranks stop at the same step, though only one of them may know that they have to.

Each rank counts its steps, and nothing is asked or sent while nobody has anything to say. Then

1. who knows leaves a word in the store;
2. every rank's own thread, which looks there now and then, promises: "I have gone past n steps, and
   go past no more until I hear from you"; its number is n + 1;
3. rank 0 takes the largest number, and that is the step at which all stop.

A rank that has promised may wait a moment before its next step, for threads that look now and then,
never for another rank's step: programs hold the ranks together, and one that waited for a step
could be what that step waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..ranks.channel import Channel


class Agreement:
    """One rank's part in it; every rank makes one.

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
