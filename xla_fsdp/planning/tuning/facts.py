"""What is known of a model after tracing two of its steps: all that an estimate starts from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...tpu.chips import Chip
from ..program.hlo import Module, parse_module
from ..program.shapes import leaves
from ..tracing.step import TracedStep
from ..tracing.traced import TracedProgram
from ..tracing.units import OnWire
from .activations import Again, again_in, by_unit, largest_by_unit, read_activations, unit_of
from .settings import ShardingSettings

# How a step is traced for facts: whole and recomputed, each block a unit.
KEPT = ShardingSettings()
RECOMPUTED = KEPT.changed(recompute="all")
# What modules that a backward runs again are called.
_RECOMPUTED = re.compile(r"recompute\[([^\]]*)\]")


@dataclass(frozen=True)
class UnitFacts:
    """One unit of a model, a block or the rest around the blocks.

    Bytes and seconds are of one device with the batch that was traced.

    Attributes:
        name: dotted; "" for the rest.
        elements, trainable, itemsize, gathered, reduced: of its parameters, as ``TracedUnit`` has
            them.
        forward: seconds of compute of a forward, by a roofline.
        held: bytes that its forward leaves for its backward.
        held_recomputed: the same if it recomputes its activations.
        largest: bytes of its largest activation.
        is_block: whether it can be recomputed.
        again: what of it a backward computes again, if so, and could keep.
    """

    name: str
    elements: int
    trainable: int
    itemsize: int
    gathered: tuple[OnWire, ...]
    reduced: tuple[OnWire, ...]
    forward: float
    held: float
    held_recomputed: float
    largest: float
    is_block: bool
    again: tuple[Again, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """One training step of a model on one device of a slice.

    Attributes:
        units: the rest of the model and then the blocks, in the order of the model.
        state: bytes of parameters and optimizer state that are sharded, over all ranks that share.
        inputs: bytes of other arguments, which grow with the batch.
        flops: of matrix products in a forward, this device's part.
        batch: samples a device in what was traced; 1 where nobody said.
        ranks: that shared the parameters in what was traced.
    """

    units: tuple[UnitFacts, ...]
    state: float
    inputs: float
    flops: float
    batch: int
    ranks: int

    @property
    def blocks(self) -> tuple[UnitFacts, ...]:
        return tuple(unit for unit in self.units if unit.is_block)

    @property
    def parameters(self) -> int:
        return sum(unit.elements for unit in self.units)

    def scaled(self, batch: int) -> StepFacts:
        """The same with another batch a device: what is computed and held grows in proportion."""
        factor = batch / self.batch
        units = tuple(
            replace(
                unit,
                forward=factor * unit.forward,
                held=factor * unit.held,
                held_recomputed=factor * unit.held_recomputed,
                largest=factor * unit.largest,
                again=tuple(
                    replace(one, seconds=factor * one.seconds, bytes=factor * one.bytes)
                    for one in unit.again
                ),
            )
            for unit in self.units
        )
        inputs, flops = factor * self.inputs, factor * self.flops
        return replace(self, units=units, inputs=inputs, flops=flops, batch=batch)


def facts_of(
    trace: Callable[[ShardingSettings], TracedStep],
    chip: Chip,
    ranks: int,
    batch: int | None = None,
    units: str | int = "blocks",
) -> StepFacts:
    """Traces a step twice, and takes it apart.

    Args:
        trace: gives the step of a rank with settings.
        ranks: of the slice, all of which share the parameters.
        batch: samples a device to trace with.
        units: as ``ShardingSettings`` has them, but not ``"model"``.

    Raises:
        ValueError: nothing in the step is wrapped by this package; or what ``trace`` raises.
    """
    kept = trace(KEPT.changed(batch=batch, units=units))
    if not kept.units:
        raise ValueError(
            "nothing in the step is sharded by xla_fsdp: wrap the model by the settings that step "
            "is called with, model = settings.wrap(Model())"
        )
    module = parse_module(hlo_text(kept.program.hlo))
    found = read_activations(module, chip)
    names = [unit.name for unit in kept.units]
    recomputed, blocks = found, set[str]()
    if len(names) > 1:
        again = trace(RECOMPUTED.changed(batch=batch, units=units))
        text = hlo_text(again.program.hlo)
        recomputed = read_activations(parse_module(text), chip)
        blocks = {unit_of(module, names) for module in _RECOMPUTED.findall(text)} - {""}
    seconds, held = by_unit(found.seconds, names), by_unit(found.held, names)
    largest = largest_by_unit(found.largest, names)
    held_again = by_unit(recomputed.held, names)
    facts = [
        UnitFacts(
            name=unit.name,
            elements=unit.elements,
            trainable=unit.trainable,
            itemsize=unit.itemsize,
            gathered=unit.gathered,
            reduced=unit.reduced,
            forward=seconds[unit.name],
            held=held[unit.name],
            held_recomputed=min(held_again[unit.name], held[unit.name]),
            largest=largest[unit.name],
            is_block=unit.name in blocks,
            again=again_in(unit.name, recomputed.again) if unit.name in blocks else (),
        )
        for unit in kept.units
    ]
    facts.sort(key=lambda unit: unit.is_block)  # the rest first; stable
    state, inputs = _arguments(kept.program, module)
    return StepFacts(
        units=tuple(facts),
        state=state * ranks,
        inputs=inputs,
        flops=sum(found.flops.values()),
        batch=batch or 1,
        ranks=ranks,
    )


def _arguments(program: TracedProgram, module: Module) -> tuple[float, float]:
    """Bytes of parameters and optimizer state on a device, and of all other arguments.

    What a step updates is its state: an argument whose buffer is taken over.
    """
    state = inputs = 0
    for number, one in enumerate(module.entry.parameters):
        size = sum(leaf.bytes for leaf in leaves(one.shape))
        if number in program.donated:
            state += size
        else:
            inputs += size
    return state, inputs


def hlo_text(hlo: bytes) -> str:
    """A serialized ``HloModuleProto`` as text."""
    import jaxlib._jax as jaxlib  # of the extra

    module: Any = jaxlib.HloModule.from_serialized_hlo_module_proto(hlo)
    return module.to_string()
