"""Calls that may never return, with an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """``call()``, made on a thread of its own.

    Raises:
        TimeoutError: it took longer. It goes on, in a thread that nobody waits for and that ends
            with the process: there is no way to end what hangs in a library.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="xla_fsdp store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not values:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return values[0]
