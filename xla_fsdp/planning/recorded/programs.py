"""What a trace says of the programs that ran: which module and phase each instruction is of.

Read with the very code that reads the program of a plan, so that both use the same names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ..program.collectives import find_collectives
from ..program.hlo import parse_module
from ..program.places import line_up
from ..program.schedule import computing
from ..program.scopes import Labels
from ..records import Collective
from .xspace import Plane, hlo_module

_HLO_PLANE = "/host:metadata"
_SECONDS_TO_READ = 120.0


@dataclass(frozen=True)
class Program:
    """One compiled program, by the names of its instructions.

    ``compute``: (phase, module) of what computes. ``starts``: the collective that begins with an
    instruction; ``ends``: the one that is waited for by it. ``times``: how often it runs in one
    execution of the program.
    """

    name: str
    compute: Mapping[str, tuple[str, str]]
    starts: Mapping[str, Collective]
    ends: Mapping[str, Collective]
    times: Mapping[str, int]

    @property
    def modules(self) -> set[str]:
        found = {module for _, module in self.compute.values()}
        return {*found, *(c.module for c in self.starts.values())} - {""}


def texts_of(planes: list[Plane]) -> dict[str, list[bytes]]:
    """The HLO modules of the programs in a trace, serialised, by what the trace calls them."""
    found: dict[str, list[bytes]] = {}
    for plane in planes:
        if plane.name == _HLO_PLANE:
            for name, stats in plane.kinds():
                for value in stats.values():
                    if isinstance(value, bytes):
                        found.setdefault(name, []).append(value)
    return found


def read_program(name: str, proto: bytes) -> Program:
    """The program in an HloProto.

    Raises:
        ValueError: it is none that this XLA knows, or is not scheduled.
    """
    try:
        text = _text(hlo_module(proto))
    except DecodeError as error:
        raise ValueError(f"program {name} is damaged") from error
    module = parse_module(text)
    if not module.scheduled:
        raise ValueError(f"program {name} is not scheduled")
    line = line_up(module)
    found = find_collectives(line)
    labels = Labels(line, {c.name: (c.phase, c.module) for c in found.collectives})
    names = [place.instruction.name for place in line.places]
    compute = {
        place.instruction.name: labels.of(place.instruction)
        for place in computing(line, found.places)
    }
    times: dict[str, int] = {}
    for place in line.places:
        times[place.instruction.name] = times.get(place.instruction.name, 0) + place.times
    starts = {names[c.index]: c for c in found.collectives}
    ends = {names[c.done]: c for c in found.collectives if c.done > c.index}
    return Program(module.name, compute, starts, ends, times)


def _text(module: bytes) -> str:
    """The module as text. By XLA in a process of its own, which damaged bytes may end."""
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.hlo_child"],
        input=module, capture_output=True, timeout=_SECONDS_TO_READ, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError("XLA cannot read a program of it")
    return done.stdout.decode()
