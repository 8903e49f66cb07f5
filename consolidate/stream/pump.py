"""Reading ahead of writing, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
# How many items wait between the two: enough to level out, few enough to be small.
AHEAD = 3


def pump(produce: Iterable[T], consume: Callable[[T], None]) -> None:
    """Calls ``consume`` with every item, in order, while another thread produces the next ones.

    An exception on either side ends both and is raised here. No thread is left when this returns.
    """
    waiting: queue.Queue = queue.Queue(AHEAD)
    stop = threading.Event()
    failure: list[BaseException] = []

    def read() -> None:
        try:
            for item in produce:
                if stop.is_set():
                    return
                waiting.put((item,))
        except BaseException as error:
            failure.append(error)
        finally:
            waiting.put(None)

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    ended = False
    try:
        while (item := waiting.get()) is not None:
            consume(item[0])
        ended = True
    finally:
        stop.set()
        # Whatever stands in the queue keeps the reader from noticing.
        while not ended and waiting.get() is not None:
            pass
        thread.join()
    if failure:
        raise failure[0]
