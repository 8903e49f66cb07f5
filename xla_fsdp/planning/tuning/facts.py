"""Sizes and times of a model, from two traced steps: the input of all estimates.

The compiler recomputes fused element-wise operations where they are used. So the tensors in memory
between forward and backward are *sources*: results of matmuls, convolutions, reductions and so on,
found by following operands through everything that can be fused. Bytes are without padding.
Results of collectives do not count: they are gathered again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...layers.saved_activations import ATTENTION
from ...tpu.chips import Chip
from ..program.flops import flops_of, is_kernel, kernel_cycles
from ..program.hlo import HloModule, Instruction, leaves, parse_module
from ..program.places import Place, inline_schedule
from ..program.scopes import parse_scope
from ..records import KINDS
from ..tracing.step import TracedStep
from ..tracing.units import TracedUnit, innermost_unit
from .settings import ShardingSettings

KEPT = ShardingSettings()
RECOMPUTED = KEPT.changed(recompute="all")
_RECOMPUTED = re.compile(rb"recompute\[([^\]]*)\]")

# The compiler recomputes these at each use, or they only move values.
_FUSED = frozenset(
    "abs add and atan2 bitcast bitcast-convert broadcast cbrt ceil clamp compare complex"
    " concatenate convert copy cosine divide dynamic-slice erf exponential exponential-minus-one"
    " floor get-tuple-element iota is-finite log log-plus-one logistic maximum minimum multiply"
    " negate not or pad popcnt power real reduce-precision remainder reshape reverse"
    " round-nearest-afz round-nearest-even rsqrt select sign sine slice sqrt subtract tan tanh"
    " transpose xor".split()
)
_MOVED = frozenset("bitcast copy reshape transpose".split())
# Values that do not count as saved.
_GIVEN = frozenset(
    [*KINDS, *(f"{kind}-start" for kind in KINDS), "parameter", "constant", "after-all", "token"]
)
# Operations whose operands must exist in memory.
_WHOLE = frozenset(["tuple", "opt-barrier", "optimization-barrier"])
_INLINED = frozenset(["while", "call", "conditional"])


@dataclass(frozen=True)
class UnitFacts(TracedUnit):
    """One unit of a model: a block, or the rest of the model, which is called "".

    On one device, with the traced batch. ``forward``: seconds, by a roofline. ``saved``: bytes that
    the forward saves for the backward; ``saved_recomputed``: with recomputation. ``largest``: bytes
    of an activation. ``again``: recomputed values that the forward could save instead.
    """

    forward: float
    saved: float
    saved_recomputed: float
    largest: float
    is_block: bool
    again: tuple[Again, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """One training step of a model on one device of a slice.

    ``units``: the rest of the model, then the blocks in order. ``state``: bytes of sharded
    parameters and optimizer state of all ranks. ``inputs``: bytes of other arguments. ``batch``:
    traced samples per device; 1 if it was not given.
    """

    units: tuple[UnitFacts, ...]
    state: float
    inputs: float
    batch: int

    @property
    def blocks(self) -> tuple[UnitFacts, ...]:
        return tuple(unit for unit in self.units if unit.is_block)

    def scaled(self, batch: int) -> StepFacts:
        """For another batch per device: compute and activations grow in proportion."""
        factor = batch / self.batch

        def scaled(one: Any, *names: str, **changes: Any) -> Any:
            return replace(one, **{name: factor * getattr(one, name) for name in names}, **changes)

        figures = ("forward", "saved", "saved_recomputed", "largest")
        units = tuple(
            scaled(unit, *figures, again=tuple(scaled(a, "seconds", "bytes") for a in unit.again))
            for unit in self.units
        )
        return replace(self, units=units, inputs=factor * self.inputs, batch=batch)


def facts_of(
    trace: Callable[[ShardingSettings], TracedStep],
    chip: Chip,
    ranks: int,
    batch: int | None = None,
    units: str | int = "blocks",
) -> StepFacts:
    """Trace a step twice and compute its facts.

    ``ranks``: all share the parameters. ``batch``: samples per device. ``units``: not ``"model"``.

    Raises ValueError if nothing in the step is wrapped by this package, and what ``trace`` raises.
    """
    kept = trace(KEPT.changed(batch=batch, units=units))
    if not kept.units:
        raise ValueError(
            "the step shards nothing with xla_fsdp: wrap the model with the settings that step "
            "receives, model = settings.wrap(Model())"
        )
    module = parse_module(kept.program.hlo)
    names = [unit.name for unit in kept.units]
    found = Activations(module, chip, names)
    recomputed, blocks = found, set[str]()
    if len(names) > 1:
        again = trace(RECOMPUTED.changed(batch=batch, units=units)).program.hlo
        recomputed = Activations(parse_module(again), chip, names)
        inside = (found.decode() for found in _RECOMPUTED.findall(again))
        blocks = {innermost_unit(module, names) for module in inside} - {""}
    facts = [
        UnitFacts(
            **vars(unit),
            forward=found.seconds[unit.name],
            saved=found.saved[unit.name],
            saved_recomputed=min(recomputed.saved[unit.name], found.saved[unit.name]),
            largest=found.largest[unit.name],
            is_block=unit.name in blocks,
            again=again_in(unit.name, recomputed.again) if unit.name in blocks else (),
        )
        for unit in kept.units
    ]
    facts.sort(key=lambda unit: unit.is_block)  # the rest first
    # An argument that is donated counts as state.
    state = inputs = 0
    for number, one in enumerate(module.entry.parameters):
        if number in kept.program.donated:
            state += ranks * _result_bytes(one)
        else:
            inputs += _result_bytes(one)
    return StepFacts(tuple(facts), state, inputs, batch or 1)


@dataclass(frozen=True)
class Again:
    """A recomputed matmul or kernel, by its name in ``scan_blocks(keep=...)``."""

    name: str
    seconds: float
    bytes: float


class Activations:
    """Figures of the forward in ``module``, a traced step with module names, on one device.

    ``saved``, ``largest``: by unit, bytes of all tensors that the backward needs, and of the
    largest. ``seconds``: by unit, by the roofline of ``chip``: for each operation that is not
    fused, the longer of its FLOPs and its HBM bytes at peak rates. ``again``: by module, recomputed
    matmuls (without names) and kernels.
    """

    def __init__(self, module: HloModule, chip: Chip, units: Sequence[str]) -> None:
        self.saved, self.largest = dict.fromkeys(units, 0), dict.fromkeys(units, 0)
        self.seconds = dict.fromkeys(units, 0.0)
        self.again: dict[str, list[Again]] = {}
        self._line, self._chip = inline_schedule(module), chip
        # Kernels have only JAX's names, after those of the calling instruction.
        self._phases = {place: parse_scope(place.path) for place in self._line.places}
        self._sources: dict[Place, frozenset[Place]] = {}
        for place in self._line.places:
            self._sources[place] = self._sources_of(place)
        unit = functools.cache(lambda module: innermost_unit(module, units))
        for place in self._saved_places():
            self.saved[unit(self._phases[place][1])] += place.times * _bytes_of([place])
        for place, (phase, name) in self._phases.items():
            instruction = place.instruction
            if instruction.opcode in _FUSED | _GIVEN | _WHOLE | _INLINED:
                continue
            kernel, size = is_kernel(instruction), _result_bytes(instruction)
            seconds, flops = self._time(place, instruction)
            if phase == "forward":
                self.seconds[unit(name)] += place.times * seconds
                self.largest[unit(name)] = max(self.largest[unit(name)], size)
            # Recomputed kernels lack the name of their module.
            if kernel and phase == "forward":
                # A kernel writes each value of a row several times; its function returns it once.
                size = _result_bytes(place.caller or instruction)
                self.again.setdefault(name, []).extend(
                    [Again(ATTENTION, seconds, size)] * place.times
                )
            elif flops and not kernel and "/recompute[" in place.path:
                self.again.setdefault(name, []).extend([Again("", seconds, size)] * place.times)

    def _time(self, place: Place, instruction: Instruction) -> tuple[float, float]:
        flops = flops_of(instruction)
        if is_kernel(instruction):
            return (kernel_cycles(instruction, self._chip) or 0) / self._chip.clock_hz, flops
        moved = _result_bytes(instruction)
        for operand in self._line.operands(place):
            own, made_of = _bytes_of([operand]), _bytes_of(self._sources[operand])
            moved += min(own, made_of) if made_of else own
        return max(flops / self._chip.device_flops, moved / self._chip.device_hbm_bandwidth), flops

    def _saved_places(self) -> set[Place]:
        saved: set[Place] = set()
        for place, (phase, _) in self._phases.items():
            if phase not in ("backward", "optimizer"):
                continue
            for operand in self._line.operands(place):
                if self._phases[operand][0] != "forward":
                    continue
                if place.instruction.opcode in _WHOLE:
                    saved.add(self._moved_from(operand))
                else:
                    saved |= self._sources[operand]
        return {
            place for place in saved
            if self._phases[place][0] == "forward"
            and place.instruction.opcode not in _GIVEN | _WHOLE
        }  # fmt: skip

    def _moved_from(self, place: Place) -> Place:
        while place.instruction.opcode in _MOVED:
            place = self._line.operands(place)[0]
        return place

    def _sources_of(self, place: Place) -> frozenset[Place]:
        """The sources through all fusible operations; those of operands are known."""
        if place.instruction.opcode not in _FUSED:
            return frozenset([place])
        found = frozenset[Place]().union(*(self._sources[o] for o in self._line.operands(place)))
        # The compiler does not recompute a chain whose sources are much larger.
        large = _bytes_of(one for one in found if one.instruction.opcode not in _GIVEN)
        return frozenset([place]) if large > 2 * _bytes_of([place]) else found


def _result_bytes(instruction: Instruction) -> int:
    return sum(leaf.bytes for leaf in leaves(instruction.shape))


def _bytes_of(places: Iterable[Place]) -> int:
    return sum(_result_bytes(place.instruction) for place in places)


def again_in(unit: str, found: Mapping[str, list[Again]]) -> tuple[Again, ...]:
    """What ``scan_blocks(keep=...)`` can save of the block ``unit``: the only matmul of a
    submodule, by the submodule's name, and a kernel, by the name of attention.
    """
    several = []
    for module, every in found.items():
        inside = module.removeprefix(f"{unit}.")
        if module != unit and inside == module:
            continue
        kernels = [one for one in every if one.name]
        several += kernels
        if len(every) == 1 and not kernels and module != unit:
            several.append(replace(every[0], name=inside))
    names = [one.name for one in several]
    return tuple(one for one in several if names.count(one.name) == 1)
