"""The hosts of a job. Each runs a TCP server for files of its fast tier and copies of other hosts'.

A client answers the server's random number with its HMAC under the job's key, then sends one
request. Request and answer are lines of JSON, perhaps followed by bytes. Requests name saves and
ranks, not paths.
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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

from ...consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    OutputError,
    UnreadableFileError,
)
from ...consolidate.format.digests import ChunkDigests, digest
from ...consolidate.format.local import LocalStore
from ...consolidate.format.manifest import Manifest, load_manifest
from ...consolidate.format.store import creating, join
from ...ranks.slices import slices_of_ranks
from ...tpu.slices import Groups
from ..rank_exchange import RankExchange, describe_error
from .host_tier import Card, HostTier

_PIECE = 1 << 22
_LINE = 1 << 26  # maximum bytes: the card of rank 0 includes the manifest
_NONCE = 32
# Seconds without a byte after which a connection is closed.
TIMEOUT = 60.0

_POLL = 0.1

Address = tuple[str, int]


class Hosts:
    """The hosts of the job, in the order of their first ranks.

    ``number``: index of this host. ``leaders``: the first rank of each, which runs its ``server``.
    ``partner``: the host that stores copies of this one's files.
    """

    def __init__(
        self, exchange: RankExchange, tier: HostTier, host: str | None, address: str | None
    ) -> None:
        mine = host or _this_host()
        of_ranks = exchange.gather_values("exchange host names", mine)
        names = list(dict.fromkeys(of_ranks))
        self.number = names.index(mine)
        self.leaders = [of_ranks.index(name) for name in names]
        self.is_leader = self.leaders[self.number] == exchange.rank
        self.server: TierServer | None = None
        key = bytes.fromhex(exchange.run_on_first_rank("make a key", lambda: secrets.token_hex(32)))

        def serve() -> Any:
            if not self.is_leader or len(names) == 1:
                return None
            self.server = TierServer(tier, key, address or _own_address())
            return self.server.address

        addresses = exchange.run_and_gather("serve the fast tier", serve)
        self.peers = [
            Peer(tuple(addresses[rank] or ("", 0)), key, f"host of rank {rank}")
            for rank in self.leaders
        ]
        stride = hosts_apart(self.leaders, slices_of_ranks())
        self.partner = self.peers[(self.number + stride) % len(names)]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


def hosts_apart(leaders: Sequence[int], slices: Groups) -> int:
    """Distance in the list of hosts from a host to the one that stores its copies.

    It is 1. If the hosts are in the order of slices of equal size, it is the number of hosts of a
    slice, because a slice fails as a unit. ``leaders``: the first rank of each host. ``slices``:
    the ranks of each slice.
    """
    on = [number for rank in leaders for number, one in enumerate(slices) if rank in one]
    each = len(leaders) // max(len(slices), 1)
    in_order = on == [number for number in range(len(slices)) for _ in range(each)]
    return each if slices and in_order and len(on) == len(leaders) else 1


def _this_host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _own_address() -> str:
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise OSError(
            f"{name}, the name of this host, has no address ({error}). Pass address=, an address "
            "of this host that other hosts can reach."
        ) from error


class TierServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, tier: HostTier, key: bytes, host: str) -> None:
        super().__init__((host, 0), _ReplicaHandler)
        self.tier, self.key = tier, key
        self.address: Address = (host, self.server_address[1])
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL,), name="xla_fsdp tier", daemon=True
        )
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing if a client closes its connection."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _ReplicaHandler(socketserver.StreamRequestHandler):
    server: TierServer
    timeout = TIMEOUT
    disable_nagle_algorithm = True  # do not delay the line before the bytes

    def handle(self) -> None:
        tier, nonce = self.server.tier, secrets.token_bytes(_NONCE)
        self.wfile.write(nonce)
        if not hmac.compare_digest(self.rfile.read(_NONCE), _answer(self.server.key, nonce)):
            return
        try:
            request = json.loads(self.rfile.readline(_LINE))
            card = Card.load(request["card"].encode(), "a request")
            if request["do"] == "put":
                _receive(tier, card, self.rfile)
                _send_line(self.wfile, {"ok": True})
            elif request["do"] == "card":
                answer = tier.card(card).dump().decode()
                _send_line(self.wfile, {"ok": True, "card": answer})
            else:
                begin, count = int(request["begin"]), int(request["count"])
                if not 0 <= begin <= begin + count <= card.record.size:
                    raise ValueError(
                        f"bytes {begin} to {begin + count} requested, but the file has "
                        f"{card.record.size}"
                    )
                tier.store.size(_path(tier, card))  # raises before "ok"
                _send_line(self.wfile, {"ok": True})
                _send_bytes(tier, card, begin, count, self.wfile)
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            _send_line(self.wfile, {"error": describe_error(error)})


def _path(tier: HostTier, card: Card) -> str:
    return join(tier.folder(card.save), card.record.name)


def _send_bytes(tier: HostTier, card: Card, begin: int, count: int, out: BufferedIOBase) -> None:
    path = _path(tier, card)
    piece = memoryview(bytearray(min(count, _PIECE)))
    for at in range(begin, begin + count, _PIECE):
        part = piece[: min(_PIECE, begin + count - at)]
        tier.store.read_into(path, at, part)
        out.write(part)


def _receive(tier: HostTier, card: Card, source: BufferedIOBase) -> None:
    """Receives a file of another host and its card. Stores it only if its digests match."""
    if card.run != tier.run:
        raise ValueError("the file belongs to another run")
    tier.store.make_folder(tier.folder(card.save))
    temporary = tier.temporary_file(card.save)
    digests = ChunkDigests(card.record.chunk)
    try:
        with creating(tier.store, temporary) as output:
            left = card.record.size
            while left:
                data = source.read(min(left, _PIECE))
                if not data:
                    raise OutputError(
                        f"{temporary}: the other host closed the connection, {left} bytes are "
                        "missing"
                    )
                digests.update(memoryview(data))
                output.write(data)
                left -= len(data)
            if digests.finish() != card.record.digests:
                raise OutputError(
                    f"{temporary}: the received bytes are not the bytes that were sent"
                )
    except BaseException:
        with contextlib.suppress(CheckpointError):
            tier.store.remove(temporary)
        raise
    tier.store.remove(_path(tier, card))
    tier.store.rename(temporary, _path(tier, card))
    tier.add_card(card)


@dataclass(frozen=True, eq=False)
class Peer:
    """A client of another host's server. ``name``: for messages."""

    address: Address
    key: bytes
    name: str

    def read_into(self, card: Card, begin: int, out: memoryview) -> None:
        """Raises UnreadableFileError."""

        def receive(source: BufferedIOBase) -> None:
            done = 0
            while done < len(out):
                count = source.readinto(out[done:])
                if not count:
                    raise ConnectionError("the connection ended")
                done += count

        self._request(
            {"do": "read", "begin": begin, "count": len(out)},
            card.without_manifest(),
            f"{card.record.name} of {card.save.folder} cannot be read",
            receive=receive,
        )

    def card(self, card: Card) -> Card:
        what = f"the manifest of {card.save.folder} cannot be read"
        answer = self._request({"do": "card"}, card, what)
        return Card.load(answer["card"].encode(), self.name)

    def put(self, tier: HostTier, card: Card) -> None:
        """Copies a file of ``tier`` and its card to the host. Raises OutputError."""
        what = f"{_path(tier, card)} cannot be copied there"

        def send(sink: BufferedIOBase) -> None:
            _send_bytes(tier, card, 0, card.record.size, sink)

        self._request({"do": "put"}, card, what, OutputError, send=send)

    def _request(
        self,
        request: dict[str, Any],
        card: Card,
        what: str,
        kind: type[CheckpointError] = UnreadableFileError,
        send: Callable[[BufferedIOBase], None] = lambda sink: None,
        receive: Callable[[BufferedIOBase], None] = lambda source: None,
    ) -> dict[str, Any]:
        """Sends a request and what ``send`` writes. Returns the answer, or raises ``kind``."""
        try:
            with (
                socket.create_connection(self.address, TIMEOUT) as connection,
                connection.makefile("rwb") as stream,
            ):
                stream.write(_answer(self.key, stream.read(_NONCE)))
                _send_line(stream, {**request, "card": card.dump().decode()})
                send(stream)
                stream.flush()
                line = stream.readline(_LINE)
                if not line:
                    raise ConnectionError("the connection ended")
                answer: dict[str, Any] = json.loads(line)
                if not answer.get("ok"):
                    raise ValueError(str(answer.get("error"))[:500])
                receive(stream)
                return answer
        except (OSError, ValueError) as error:
            host, port = self.address
            raise kind(
                f"{self.name} ({host}:{port}): {what}: {error or type(error).__name__}. If "
                "the host is running, check that hosts reach each other, or pass address=."
            ) from error


def _answer(key: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, nonce, hashlib.sha256).digest()


def _send_line(out: BufferedIOBase, value: dict[str, Any]) -> None:
    out.write(json.dumps(value).encode() + b"\n")
    out.flush()


class MultiHostStore(LocalStore):
    """A read-only store with one folder, whose files may be on other hosts.

    A chunk that is damaged on one host is read from the next host, with a warning. The caller must
    check digests, because those of the last host are not checked here. ``copies_of`` returns the
    hosts that have the file of a rank, in the order to read from them; ``None`` is this host.
    """

    def __init__(
        self,
        tier: HostTier,
        cards: Mapping[int, Card],
        copies_of: Callable[[int], Sequence[Peer | None]],
    ) -> None:
        self.folder = join(tier.root, f"step-{cards[0].save.step:08d}")
        self._tier, self._by_rank = tier, cards
        self._cards = {card.record.name: card for card in cards.values()}
        self._copies = {rank: list(copies_of(rank)) for rank in cards}

    def manifest(self) -> Manifest:
        """Raises CorruptFileError, InvalidMetadataError."""
        first = self._by_rank[0]
        records = [self._by_rank[rank].record for rank in range(first.world_size)]
        return load_manifest(first.manifest.encode(), f"manifest of {first.save.folder}", records)

    def size(self, path: str) -> int:
        return self._card(path).record.size

    def read_into(self, path: str, begin: int, out: memoryview) -> None:
        card = self._card(path)
        *others, last = self._copies[card.rank]
        for peer in others:
            try:
                self._read(card, peer, begin, out)
                if self._matches_digests(card, begin, out):
                    return
                wrong = f"bytes {begin} to {begin + len(out)} are damaged"
            except CheckpointError as error:
                wrong = str(error)
            self._move_to_end(card, peer, wrong)
        self._read(card, last, begin, out)

    def _read(self, card: Card, peer: Peer | None, begin: int, out: memoryview) -> None:
        if peer is None:
            self._tier.store.read_into(_path(self._tier, card), begin, out)
        else:
            peer.read_into(card, begin, out)

    @staticmethod
    def _matches_digests(card: Card, begin: int, out: memoryview) -> bool:
        # Only complete chunks have digests; readers read complete chunks.
        number, inside = divmod(begin, card.record.chunk)
        length = min(card.record.chunk, card.record.size - begin)
        return inside == 0 and len(out) == length and digest(out) == card.record.digest_of(number)

    def _move_to_end(self, card: Card, peer: Peer | None, wrong: str) -> None:
        copies = [other for other in self._copies[card.rank] if other is not peer]
        self._copies[card.rank] = [*copies, peer]
        warnings.warn(
            f"{card.record.name} of {card.save.folder} on {peer.name if peer else 'this host'}: "
            f"{wrong:.300}; it is read from another host. Check the memory and the network of "
            "the host that failed.",
            stacklevel=2,
        )

    def list(self, path: str) -> list[str]:
        return list(self._cards) if path == self.folder else []

    def is_folder(self, path: str) -> bool:
        return path == self.folder

    def _card(self, path: str) -> Card:
        card = self._cards.get(path.removeprefix(f"{self.folder}/"))
        if card is None:
            raise CheckpointNotFoundError(f"{path}: does not exist in this save")
        return card
