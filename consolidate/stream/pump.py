"""Reads ahead in a separate thread while the calling thread writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
# Maximum number of items in the queue: enough for uneven speeds, and small in memory.
AHEAD = 3


def pump(produce: Iterable[T], consume: Callable[[T], None]) -> None:
    """Calls ``consume`` with every item, in order, while another thread produces the next ones.

    An exception in either thread stops both and is raised here. The thread has ended when this
    returns.
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
        # Empty the queue, so that the reader is not blocked and sees `stop`.
        while not ended and waiting.get() is not None:
            pass
        thread.join()
    if failure:
        raise failure[0]
