"""Hosts read from each other's folders, and put copies of files there, over TCP.

A connection begins with a number that the server draws and the client's HMAC of it under the key
of the job, which rank 0 makes up and tells all ranks: nobody else is served. Then each request is a
line of JSON and perhaps bytes, and so is each answer. Names are those of a tier, so that nothing
else on the host can be reached. Bytes are not encrypted, as those of collectives are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from io import BufferedIOBase
from typing import Any

from ...consolidate.errors import (
    CheckpointError,
    OutputError,
    UnreadableFileError,
)
from ...consolidate.format.digests import ChunkDigests
from ...consolidate.format.store import join
from ...wording import in_a_line
from .holding import Card, HostTier, own_card

_PIECE = 1 << 22
_LINE = 1 << 26  # bytes of a line: the card of rank 0 has a manifest in it
_NONCE = 32
# Seconds without a byte after which the other side is taken to be gone.
TIMEOUT = 60.0

_POLL = 0.1  # seconds until it is seen that the server is to end

Address = tuple[str, int]


class TierServer:
    """Serves the folder of this host until it is closed."""

    def __init__(self, tier: HostTier, key: bytes, host: str) -> None:
        handler = _handler(tier, key)
        self._server = _Server((host, 0), handler)
        self.address: Address = (host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL,), name="xla_fsdp tier", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is its own affair: nothing is printed."""


def _handler(tier: HostTier, key: bytes) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = TIMEOUT
        disable_nagle_algorithm = True  # an answer is a line and then bytes

        def handle(self) -> None:
            nonce = secrets.token_bytes(_NONCE)
            self.wfile.write(nonce)
            if not hmac.compare_digest(self.rfile.read(_NONCE), _answer(key, nonce)):
                return
            while line := self.rfile.readline(_LINE):
                try:
                    request = json.loads(line)
                    if request["do"] == "put":
                        _receive(tier, request, self.rfile)
                        _say(self.wfile, {"ok": True})
                    elif request["do"] == "card":
                        card = own_card(tier, Card.load(request["card"].encode(), "a request"))
                        _say(self.wfile, {"ok": True, "card": card.dump().decode()})
                    else:
                        _send(tier, request, self.wfile)
                except (CheckpointError, KeyError, ValueError, TypeError) as error:
                    _say(self.wfile, {"error": f"{type(error).__name__}: {in_a_line(error, 500)}"})
                    return  # what else was sent is not read

    return Handler


def _send(tier: HostTier, request: dict[str, Any], out: BufferedIOBase) -> None:
    card = Card.load(request["card"].encode(), "a request")
    begin, count = int(request["begin"]), int(request["count"])
    if not 0 <= begin <= begin + count <= card.record.size:
        raise ValueError(f"bytes {begin} to {begin + count} of {card.record.size}")
    path = join(tier.folder(card.save), card.name)
    piece = memoryview(bytearray(min(count, _PIECE)))
    tier.store.size(path)  # else the error comes after it was said that there is none
    _say(out, {"ok": True})
    for at in range(begin, begin + count, _PIECE):
        part = piece[: min(_PIECE, begin + count - at)]
        tier.store.read_into(path, at, part)
        out.write(part)


def _receive(tier: HostTier, request: dict[str, Any], source: BufferedIOBase) -> None:
    """A file of another host and its card: as it was written there, or not at all."""
    card = Card.load(request["card"].encode(), "a request")
    if card.run != tier.run:
        raise ValueError("the file is of another run")
    folder = tier.folder(card.save)
    tier.store.make_folder(folder)
    draft = join(folder, f".{secrets.token_hex(8)}.draft")
    output = tier.store.create(draft)
    digests = ChunkDigests(card.record.chunk)
    try:
        left = card.record.size
        while left:
            data = source.read(min(left, _PIECE))
            if not data:
                raise OutputError(f"{draft}: the other host was gone with {left} bytes to come")
            digests.update(memoryview(data))
            output.write(data)
            left -= len(data)
        if tuple(digests.finish()) != card.record.digests:
            raise OutputError(f"{draft}: not the bytes that were sent arrived")
        output.close()
    except BaseException:
        output.discard()
        with contextlib.suppress(CheckpointError):
            tier.store.remove(draft)
        raise
    tier.store.remove(join(folder, card.name))  # of a copy that was sent before
    tier.store.rename(draft, join(folder, card.name))
    tier.add_card(card)


class Peer:
    """Another host, as a client; threads take turns. ``name``: for messages."""

    def __init__(self, address: Address, key: bytes, name: str) -> None:
        self.address, self.name = address, name
        self._key = key
        self._lock = threading.Lock()
        self._files: tuple[socket.socket, BufferedIOBase, BufferedIOBase] | None = None

    def read_into(self, card: Card, begin: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes of a file from ``begin`` on.

        Raises:
            UnreadableFileError: the host does not answer, or has no such file.
        """
        request = {
            "do": "read",
            "card": card.bare().dump().decode(),
            "begin": begin,
            "count": len(out),
        }

        def answer(source: BufferedIOBase, sink: BufferedIOBase) -> None:
            _say(sink, request)
            _require(source)
            done = 0
            while done < len(out):
                count = source.readinto(out[done:])
                if not count:
                    raise ConnectionError("the connection ended")
                done += count

        self._ask(answer, f"{card.name} of {card.save.folder} cannot be read", UnreadableFileError)

    def manifest(self, card: Card) -> Card:
        """``card``, which is bare, with the manifest that the host has of it."""
        found: list[Card] = []

        def answer(source: BufferedIOBase, sink: BufferedIOBase) -> None:
            _say(sink, {"do": "card", "card": card.dump().decode()})
            found.append(Card.load(_require(source)["card"].encode(), self.name))

        self._ask(answer, f"the manifest of {card.save.folder} cannot be read", UnreadableFileError)
        return found[0]

    def put(self, tier: HostTier, card: Card) -> None:
        """Copies a file of ``tier`` and its card there.

        Raises:
            OutputError: the host does not answer, or has no room.
        """
        path = join(tier.folder(card.save), card.name)

        def answer(source: BufferedIOBase, sink: BufferedIOBase) -> None:
            _say(sink, {"do": "put", "card": card.dump().decode()})
            piece = memoryview(bytearray(min(_PIECE, card.record.size)))
            for at in range(0, card.record.size, _PIECE):
                part = piece[: min(_PIECE, card.record.size - at)]
                tier.store.read_into(path, at, part)
                sink.write(part)
            sink.flush()
            _require(source)

        self._ask(answer, f"{path} cannot be copied there", OutputError)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _ask(
        self,
        work: Callable[[BufferedIOBase, BufferedIOBase], None],
        what: str,
        kind: type[CheckpointError],
    ) -> None:
        with self._lock:
            try:
                work(*self._connected())
            except (OSError, ValueError) as error:
                self._drop()
                host, port = self.address
                raise kind(
                    f"{self.name} ({host}:{port}): {what}: {error or type(error).__name__}; if "
                    "the host is there, see to it that hosts reach each other, or give address="
                ) from error

    def _connected(self) -> tuple[BufferedIOBase, BufferedIOBase]:
        if self._files is None:
            made = socket.create_connection(self.address, TIMEOUT)
            source, sink = made.makefile("rb"), made.makefile("wb")
            self._files = made, source, sink
            nonce = source.read(_NONCE)
            sink.write(_answer(self._key, nonce))
        return self._files[1], self._files[2]

    def _drop(self) -> None:
        if self._files is not None:
            made, source, sink = self._files
            for close in (sink.close, source.close, made.close):
                with contextlib.suppress(OSError):
                    close()
            self._files = None


def _answer(key: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, nonce, hashlib.sha256).digest()


def _say(out: BufferedIOBase, value: dict[str, Any]) -> None:
    out.write(json.dumps(value).encode() + b"\n")
    out.flush()


def _require(source: BufferedIOBase) -> dict[str, Any]:
    """The answer, which is not an error."""
    line = source.readline(_LINE)
    if not line:
        raise ConnectionError("the connection ended")
    answer: dict[str, Any] = json.loads(line)
    if not answer.get("ok"):
        raise ValueError(str(answer.get("error"))[:500])
    return answer
