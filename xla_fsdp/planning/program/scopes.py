"""Finds the phase and module of operations by their names, such as
``backward[blocks.3].2/all_gather[blocks.3.f1.weight].1/xla__all_gather``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .hlo import Instruction
from .places import InlinedSchedule

_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "backward",
    "optimizer": "optimizer",
}
_AGAIN = "recompute["
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_SCOPE = re.compile(r"(\w+)\[([^\]]*)\](?:\.\d+)?")
_MOVES = frozenset(
    "copy copy-start copy-done slice slice-start slice-done bitcast reshape transpose convert"
    " get-tuple-element".split()
)
# Names in torch_xla and jax. The order matters: psum_scatter contains psum.
_ASKED = (
    ("all-gather", ("all_gather", "allgather")),
    ("reduce-scatter", ("reduce_scatter", "psum_scatter")),
    ("all-reduce", ("all_reduce", "cross_replica_sum", "psum", "pmax", "pmin")),
    ("all-to-all", ("all_to_all",)),
    ("collective-permute", ("collective_permute", "ppermute")),
)


def parse_scope(op_name: str) -> tuple[str, str]:
    """(phase, module) of an operation; ("", "") if it was traced outside of any scope.

    A forward inside a backward belongs to the backward; a collective has its parameter as module.
    """
    phases: list[str] = []
    module = parameter = ""
    for segment in op_name.split("/"):
        found = _SCOPE.fullmatch(segment)
        if found and found[1] in _PHASES:
            phases.append(_PHASES[found[1]])
            module = found[2]
        elif found and found[1] in _COLLECTIVES:
            parameter = found[2]
    phase = next((p for p in ("backward", "optimizer", "forward") if p in phases), "")
    return phase, parameter or module


def asked(op_name: str) -> str:
    """The kind of collective that was traced, or ""."""
    for segment in reversed(op_name.replace("-", "_").split("/")):
        for kind, names in _ASKED:
            if any(name in segment for name in names):
                return kind
    return ""


class Labels:
    """The (phase, module) of every instruction of a schedule.

    An instruction that only moves data has those of its operand, a fusion those of its last named
    instruction. ``known``: those of instructions that lost their name.
    """

    def __init__(self, line: InlinedSchedule, known: Mapping[str, tuple[str, str]]):
        self._known: dict[int, tuple[str, str]] = {}
        for place in line.places:
            instruction = place.instruction
            found = known.get(instruction.name) or parse_scope(self._name(instruction))
            if not any(found) and instruction.opcode in _MOVES:
                for operand in line.operands(place)[:1]:
                    found = self._known.get(id(operand.instruction), found)
            self._known[id(instruction)] = found

    def of(self, instruction: Instruction) -> tuple[str, str]:
        return self._known[id(instruction)]

    def is_recomputed(self, instruction: Instruction) -> bool:
        return _AGAIN in self._name(instruction)

    def _name(self, instruction: Instruction) -> str:
        """Its name; of a fusion without scopes, the last name inside that has some."""
        names = [instruction.op_name]
        if instruction.opcode == "fusion" and not any(parse_scope(instruction.op_name)):
            names += [one.op_name for one in reversed(instruction.called[0].instructions)]
        return next((name for name in names if any(parse_scope(name))), names[0])
