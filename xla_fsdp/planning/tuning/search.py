"""Choose the candidates to compile, one after the other, and rank the results.

A candidate saves values for the backward (``kept_blocks``, ``keep``) while the estimate has room:

* Full parameters of units, so that some units use ZeRO-2 and the others ZeRO-3. A saved unit needs
  no second gather; that saves the part of the gather's time that does not overlap with compute.
  Where gathers overlap with compute, this may help only for the last unit: no other backward runs
  before its own, so nothing overlaps with its gather.
* Values of blocks in a loop that would otherwise be recomputed.

The value that saves most time per byte comes first. Among equals the last one does, because its
backward runs first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...wording import first_line
from ..compiling.compiler import CompileError
from .estimate import Correction, Estimate, Estimates
from .facts import StepFacts
from .remedies import GIB, describe_remedy, with_remedy
from .settings import ShardingSettings
from .space import Space, main_of, plainness

# A candidate is not compiled if its estimate is slower than the best by more than this share. The
# second value is for kinds of candidates that were not compiled yet; their estimates are less sure.
_SLACK, _SLACK_OF_NEW = 0.05, 0.1
# A candidate is not compiled if its estimate needs more than this multiple of HBM.
_OVER, _OVER_OF_NEW = 1.1, 1.5
# Times that differ by less count as equal: the model is not more exact.
_EQUAL = 1e-3
# Of candidates whose estimates differ by less, the one closest to the defaults is compiled first.
_CLOSE = 1e-2


@dataclass(frozen=True)
class Measured:
    """Time and memory of a compiled step on one device.

    ``seconds`` = ``compute`` + ``exposed``, 0 if it does not fit; ``hbm``: bytes that must be free,
    0 if the compiler stopped before it knew them; ``mfu``: model FLOPs utilisation.
    """

    seconds: float
    compute: float
    exposed: float
    hbm: float
    fits: bool
    mfu: float
    compile_seconds: float
    from_cache: bool = False


@dataclass(frozen=True)
class Trial:
    """One candidate. ``estimate``: corrected by all results of the search. ``measured``: None if it
    was not compiled. ``rejected``: why it is not the result; "" for the result."""

    settings: ShardingSettings
    estimate: Estimate
    measured: Measured | None = None
    rejected: str = ""

    @property
    def per_sample(self) -> float:
        """Seconds per sample of a device's batch; per step if no batch was searched."""
        seconds = self.measured.seconds if self.measured else self.estimate.seconds
        return seconds / (self.settings.batch or 1)


@dataclass
class Search:
    """Compiles the most promising candidates, best first.

    Args:
        measure: compiles a step with settings. Raises ValueError or RuntimeError where these are
            not possible, CompileError where the compiler fails.
        capacity: bytes of HBM that a step may take.
        budget: how many compilations, those of which the results were kept included.
        say: is told of each.
        own: the step as the caller has it, without settings; None if there is none.
        own_batch: samples of a device in it.
    """

    space: Space
    estimates: Estimates
    measure: Callable[[ShardingSettings], Measured]
    capacity: float
    budget: int
    say: Callable[[str], None] = lambda text: None
    own: Measured | None = None
    own_batch: int = 1
    correction: Correction = field(default_factory=Correction)
    compilations: int = 0
    _found: dict[ShardingSettings, Measured] = field(default_factory=dict)
    _impossible: dict[ShardingSettings, str] = field(default_factory=dict)

    def run(self) -> list[Trial]:
        """Return all candidates: first the result, if there is one, then those that fit, the
        fastest first, then the others."""
        candidates = self.space.main()
        while self.compilations < self.budget and (one := self._next(candidates)):
            self._ask(one)
        return self._trials(list(dict.fromkeys([*candidates, *self._asked])))

    @property
    def _asked(self) -> list[ShardingSettings]:
        return [*self._found, *self._impossible]

    @property
    def _own_per_sample(self) -> float:
        """Seconds of the caller's own step; infinite if there is none, or it does not fit."""
        fits = self.own is not None and self.own.fits
        return self.own.seconds / self.own_batch if self.own is not None and fits else math.inf

    def answer(self) -> ShardingSettings | None:
        """:meth:`best`; ``None`` if that is not faster than the caller's own step."""
        best = self.best()
        if best is None:
            return None
        faster = self._trial(best).per_sample < (1 - _EQUAL) * self._own_per_sample
        return best if faster else None

    def best(self) -> ShardingSettings | None:
        """The compiled candidate that fits and has the least time per sample.

        Of equal ones it is the one closest to the defaults, and of these the one compiled first.
        """
        fitting = {
            one: self._trial(one).per_sample for one, found in self._found.items() if found.fits
        }
        bar = (1 + _EQUAL) * min(fitting.values(), default=0.0)
        return min((one for one, time in fitting.items() if time <= bar), key=plainness,
                   default=None)  # fmt: skip

    def _estimate(self, settings: ShardingSettings) -> Estimate:
        return self.correction.applied(settings, self.estimates.of(settings))

    def _trial(self, settings: ShardingSettings) -> Trial:
        return Trial(settings, self._estimate(settings), self._found.get(settings))

    def _next(self, candidates: Sequence[ShardingSettings]) -> ShardingSettings | None:
        """The next candidate to compile: one that may be better than the best so far."""
        known, best = self._asked, self.best()
        around = self.space.around(best, self.estimates) if best else []
        left = [
            one for one in (*candidates, *self._by_worth(candidates), *around)
            if one not in known and self._may_fit(one)
        ]  # fmt: skip
        if best is None:
            # First the defaults of a script, then the defaults with the one change with which they
            # would fit. So the result is never slower than these.
            first = candidates[0]
            fits = with_remedy(first, self.estimates, self.correction, self.capacity)
            at_hand = next((one for one in (first, fits) if one in left), None)
            if at_hand is not None:
                return at_hand
        else:
            left = [one for one in left if self._may_be_faster(one, best)]
        fastest = min(map(self._modelled, left), default=0.0)
        close = (one for one in left if self._modelled(one) <= (1 + _CLOSE) * fastest)
        return min(close, key=lambda one: (plainness(one), self._modelled(one)), default=None)

    def _modelled(self, settings: ShardingSettings) -> float:
        """Estimated seconds per sample. For a variant of the best, the time of the best is scaled
        by the ratio of the two estimates."""
        found, best = self._trial(settings).per_sample, self.best()
        if best is None or main_of(settings) != main_of(best):
            return found
        return found * self._trial(best).per_sample / Trial(best, self._estimate(best)).per_sample

    def _may_be_faster(self, settings: ShardingSettings, best: ShardingSettings) -> bool:
        slack = _SLACK if self.correction.knows(settings) else _SLACK_OF_NEW
        fastest = min(self._trial(best).per_sample, self._own_per_sample)
        return self._modelled(settings) * (1 - slack) < fastest

    def _by_worth(self, candidates: Sequence[ShardingSettings]) -> list[ShardingSettings]:
        """Candidates with the values of ``kept_blocks`` or ``keep`` that pay, by the estimates."""
        several = (
            with_worthwhile_keeps(one, self.estimates.facts(one), self._estimate, self.capacity)
            for one in candidates
            if ("keep" if one.scan else "kept_blocks") in self.space.by_worth
        )
        return [one for one in dict.fromkeys(several) if one not in candidates]

    def _may_fit(self, settings: ShardingSettings) -> bool:
        over = _OVER if self.correction.knows(settings) else _OVER_OF_NEW
        return self._estimate(settings).hbm <= over * self.capacity

    def _ask(self, settings: ShardingSettings) -> None:
        try:
            found = self.measure(settings)
        except CompileError as error:
            self.compilations += 1
            self._impossible[settings] = f"the compiler failed: {first_line(error)}"
        except (ValueError, RuntimeError) as error:
            self._impossible[settings] = f"not possible: {first_line(error)}"
        else:
            self.compilations += 1
            self._found[settings] = found
            self._learn(settings, found)
        self.say(self._told(settings))

    def _learn(self, settings: ShardingSettings, found: Measured) -> None:
        guessed = self.estimates.of(settings)
        if found.seconds:
            told = Estimate(found.compute, found.exposed, found.hbm, guessed.state)
            self.correction.learn(settings, guessed, told)
        elif found.hbm:
            self.correction.learn_memory(settings, guessed, found.hbm)

    def _told(self, settings: ShardingSettings) -> str:
        count = f"{self.compilations} of {self.budget} compilations"
        found = self._found.get(settings)
        if found is None:
            return f"{count}: {settings}: {self._impossible[settings]}"
        if not found.fits:
            return f"{count}: {settings}: {self._too_large(settings)}"
        best = self.best()
        fastest = "the fastest so far" if settings == best else f"slower than {best}"
        return f"{count}: {settings}: {1e3 * found.seconds:.2f} ms, {fastest}"

    # The answer.

    def _trials(self, candidates: Sequence[ShardingSettings]) -> list[Trial]:
        best = self.answer()
        trials = [
            Trial(one, self._estimate(one), self._found.get(one), self._why_not(one, best))
            for one in candidates
        ]
        return sorted(trials, key=lambda trial: _rank(trial, best))

    def _why_not(self, settings: ShardingSettings, best: ShardingSettings | None) -> str:
        if settings == best:
            return ""
        if settings in self._impossible:
            return self._impossible[settings]
        found = self._found.get(settings)
        if found is not None and not found.fits or found is None and not self._may_fit(settings):
            return self._too_large(settings)
        fastest = self._own_per_sample if best is None else self._trial(best).per_sample
        times = self._trial(settings).per_sample / fastest
        if found is not None:
            as_fast = "as your own step" if best is None else ", and further from the defaults"
            slower = f"{times:.2f} times the time of the best"
            return slower if times > 1 + _EQUAL else f"as fast{as_fast}"
        slack = _SLACK if self.correction.knows(settings) else _SLACK_OF_NEW
        if times * (1 - slack) >= 1:
            return f"not compiled: modelled {times:.2f} times the time of the best"
        return "not compiled: the budget was spent"

    def _too_large(self, settings: ShardingSettings) -> str:
        found = self._found.get(settings)
        hbm = found.hbm if found and found.hbm else self._estimate(settings).hbm
        said = "does not fit" if found else "would not fit"
        what = f"{said} {too_much(hbm, self.capacity)}"
        if found and not found.hbm:
            what = f"{said}: the compiler stopped before it knew the required memory"
        remedy = describe_remedy(settings, self.estimates, self.correction, self.capacity)
        return f"{what}; {remedy}" if remedy else what


def too_much(hbm: float, capacity: float) -> str:
    """By how much a step that needs ``hbm`` bytes does not fit."""
    excess = max(hbm - capacity, 0.0) / GIB
    return f"by {excess:.1f} GiB: {hbm / GIB:.1f} of {capacity / GIB:.1f} GiB"


def _rank(trial: Trial, best: ShardingSettings | None) -> tuple[int, float]:
    if trial.settings == best:
        return 0, 0.0
    if trial.measured is not None:
        return (1 if trial.measured.fits else 2), trial.per_sample
    return 3, trial.per_sample


def with_worthwhile_keeps(
    settings: ShardingSettings,
    facts: StepFacts,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
) -> ShardingSettings:
    """``settings`` with the values of ``keep`` or ``kept_blocks`` that save time and fit.

    Returns ``settings`` if there are none, or if they already have some. ``facts``: of the model
    with these settings. ``capacity``: bytes of HBM.
    """
    if settings.keep or settings.kept_blocks or settings.units == "model" or not facts.blocks:
        return settings
    if settings.scan_prefetch:
        # A precaution without a known reason: both models that were planned with keep and
        # scan_prefetch together were slower, but other settings differed as well (ViT-10B on
        # v5litepod-256, LLaMA 8B on v6e-64: benchmarks/LOG.md).
        return settings
    if settings.scan:
        values = [one.name for one in facts.blocks[0].again]
        return _best(
            settings, len(values), estimate, capacity,
            lambda chosen: settings.changed(keep=tuple(values[n] for n in chosen)),
        )  # fmt: skip
    if settings.reshard_after_forward is not True:
        return settings
    units = _units(settings, facts)

    def kept(chosen: Sequence[int]) -> ShardingSettings:
        if len(chosen) == len(units):
            return settings.changed(reshard_after_forward=False)
        return settings.changed(kept_blocks=tuple(name for n in chosen for name in units[n]))

    return _best(settings, len(units), estimate, capacity, kept)


def _best(
    settings: ShardingSettings,
    count: int,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
    keeping: Callable[[Sequence[int]], ShardingSettings],
) -> ShardingSettings:
    """Choose which of ``count`` values to save: ``keeping(numbers)`` gives the settings."""
    plain = estimate(settings)
    worth = []
    for number in range(count):
        one = estimate(keeping([number]))
        saved = plain.seconds - one.seconds
        if saved > 0:
            worth.append((saved / max(one.hbm - plain.hbm, 1.0), number))
    chosen: list[int] = []
    for _, number in sorted(worth, reverse=True):
        more = sorted([*chosen, number])
        if estimate(keeping(more)).hbm <= capacity:
            chosen = more
    return keeping(chosen) if chosen else settings


def _units(settings: ShardingSettings, facts: StepFacts) -> list[tuple[int | str, ...]]:
    """The ``kept_blocks`` value of each unit, except the outermost, which is always kept."""
    if settings.units != "blocks":
        return [(unit.name,) for unit in facts.blocks]
    count, size = len(facts.blocks), settings.blocks_per_unit
    return [tuple(range(first, min(first + size, count))) for first in range(0, count, size)]
