"""The hosts of a job, each of which serves its fast tier to the others."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...ranks.slices import slices_of_ranks
from ...tpu.slices import Groups
from ..meeting import Meeting
from .holding import HostTier
from .wire import Peer, TierServer


@dataclass
class Hosts:
    """The hosts of the job, in the order of their first ranks, which lead and serve them.

    ``stride``: from a host to the one with its copies.
    """

    number: int
    leaders: list[int]
    leads: bool
    peers: list[Peer]
    server: TierServer | None
    stride: int = 1

    @classmethod
    def meet(cls, meeting: Meeting, tier: HostTier, host: str | None, address: str | None) -> Hosts:
        mine = host or _this_host()
        names = meeting.gather("tell the hosts", mine)
        leaders = [names.index(name) for name in dict.fromkeys(names)]
        number = list(dict.fromkeys(names)).index(mine)
        leads = leaders[number] == meeting.rank
        key = bytes.fromhex(meeting.first("make a key", lambda: secrets.token_hex(32)))
        servers: list[TierServer] = []

        def serve() -> Any:
            if not leads or len(leaders) == 1:
                return None
            servers.append(TierServer(tier, key, address or _own_address()))
            return servers[0].address

        addresses = meeting.together("serve the fast tier", serve)
        peers = [
            Peer(tuple(addresses[rank] or ("", 0)), key, f"host of rank {rank}") for rank in leaders
        ]
        stride = hosts_apart(leaders, slices_of_ranks())
        return cls(number, leaders, leads, peers, servers[0] if servers else None, stride)

    def partner(self) -> Peer:
        """The host that has copies of what is here."""
        return self.peers[(self.number + self.stride) % len(self.peers)]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        if self.server is not None:
            self.server.close()
            self.server = None


def hosts_apart(leaders: Sequence[int], slices: Groups) -> int:
    """How far the host with the copies of another is, in the order of hosts: the next one, but of
    several slices the one at the same place of the next slice, as a slice is lost as a whole.

    ``leaders``: the first rank of each host. ``slices``: ordinals of the ranks of each.
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
            f"{name}, the name of this host, has no address ({error}): give address=, the one that "
            "other hosts reach"
        ) from error
