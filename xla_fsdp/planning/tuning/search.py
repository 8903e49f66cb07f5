"""Which candidates the compiler is asked about, one after the other, and what it made of them.

A candidate keeps things for the backward, one by one, as long as there is room:

* Units, their full parameters: ZeRO-2 or ZeRO-3 unit by unit. One that is kept saves its second
  gather, or what of that nothing hides. Where gathers run beside compute that may be the last unit
  alone: before its backward there is none of another to hide its gather behind.
* Values of blocks in a loop, which else are computed again.

What saves most for a byte comes first; of equals the last, whose backward comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...wording import first_line
from ..compiling.compiler import CompileError
from .estimate import Correction, Estimate, Estimates
from .facts import StepFacts
from .remedies import GIB, remedied, would_give
from .settings import ShardingSettings
from .space import Space, main_of, plainness

# A candidate is not worth a compilation whose estimate is so much slower than the best; the first
# of a kind of computing blocks, of which an estimate is less sure.
_SLACK, _SLACK_OF_NEW = 0.05, 0.1
# Of HBM, by an estimate: more than that the compiler is not asked about.
_OVER, _OVER_OF_NEW = 1.1, 1.5
# Times that differ by less are equal: the model is not that good.
_EQUAL = 1e-3
# Of candidates whose estimates differ by less, the plainest is first.
_CLOSE = 1e-2


@dataclass(frozen=True)
class Measured:
    """What the compiler and the time model say of a step on one device.

    ``seconds`` = ``compute`` + ``exposed``, 0 where it does not fit; ``hbm``: bytes that must be
    free, 0 if the compiler gave up before it knew; ``mfu``: model FLOPs utilisation.
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
    """One candidate. ``estimate``: as corrected by what was known at the end; ``measured``: None if
    the compiler was not asked. ``rejected``: why it is not the answer, "" for the answer."""

    settings: ShardingSettings
    estimate: Estimate
    measured: Measured | None = None
    rejected: str = ""

    @property
    def per_sample(self) -> float:
        """Seconds a sample of one device's batch, or a step where no batch was searched."""
        seconds = self.measured.seconds if self.measured else self.estimate.seconds
        return seconds / (self.settings.batch or 1)


@dataclass
class Search:
    """Asks the compiler about the most promising candidates, best first.

    Args:
        measure: compiles a step with settings. Raises ValueError or RuntimeError where these are
            not possible, CompileError where the compiler fails.
        capacity: bytes of HBM that a step may take.
        budget: how many compilations, those of which the results were kept included.
        say: is told of each.
    """

    space: Space
    estimates: Estimates
    measure: Callable[[ShardingSettings], Measured]
    capacity: float
    budget: int
    say: Callable[[str], None] = lambda text: None
    correction: Correction = field(default_factory=Correction)
    compilations: int = 0
    _found: dict[ShardingSettings, Measured] = field(default_factory=dict)
    _impossible: dict[ShardingSettings, str] = field(default_factory=dict)

    def run(self) -> list[Trial]:
        """All candidates, the answer first, if there is one; then those that fit, the fastest
        first; then the others."""
        candidates = self.space.main()
        while self.compilations < self.budget and (one := self._next(candidates)):
            self._ask(one)
        return self._trials(list(dict.fromkeys([*candidates, *self._asked])))

    @property
    def _asked(self) -> list[ShardingSettings]:
        return [*self._found, *self._impossible]

    def best(self) -> ShardingSettings | None:
        """The fastest a sample of those that fit; of equals the plainest, and of these the one
        compiled first."""
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
        """Of those not asked about yet, what may be better than the best."""
        known, best = self._asked, self.best()
        around = self.space.around(best, self.estimates) if best else []
        left = [
            one for one in (*candidates, *self._by_worth(candidates), *around)
            if one not in known and self._may_fit(one)
        ]  # fmt: skip
        if best is None:
            # What a script does without settings, and then with the one change with which that
            # would fit: an answer is to be no worse than what is next at hand.
            first = candidates[0]
            fits = remedied(first, self.estimates, self.correction, self.capacity)
            at_hand = next((one for one in (first, fits) if one in left), None)
            if at_hand is not None:
                return at_hand
        else:
            left = [one for one in left if self._may_be_faster(one, best)]
        fastest = min(map(self._modelled, left), default=0.0)
        close = (one for one in left if self._modelled(one) <= (1 + _CLOSE) * fastest)
        return min(close, key=lambda one: (plainness(one), self._modelled(one)), default=None)

    def _modelled(self, settings: ShardingSettings) -> float:
        """Seconds a sample, by the estimate; of what is tried on the best, against the best's."""
        found, best = self._trial(settings).per_sample, self.best()
        if best is None or main_of(settings) != main_of(best):
            return found
        return found * self._trial(best).per_sample / Trial(best, self._estimate(best)).per_sample

    def _may_be_faster(self, settings: ShardingSettings, best: ShardingSettings) -> bool:
        slack = _SLACK if self.correction.knows(settings) else _SLACK_OF_NEW
        return self._modelled(settings) * (1 - slack) < self._trial(best).per_sample

    def _by_worth(self, candidates: Sequence[ShardingSettings]) -> list[ShardingSettings]:
        """Candidates with what they would rather keep, by what is known now."""
        several = (
            worth_keeping(one, self.estimates.facts(one), self._estimate, self.capacity)
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
        best = self.best()
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
        if best is None:
            return "not compiled: the budget was spent"
        times = self._trial(settings).per_sample / self._trial(best).per_sample
        if found is not None:
            faster = "as fast, and further from the defaults"
            return f"{times:.2f} times the time of the best" if times > 1 + _EQUAL else faster
        slack = _SLACK if self.correction.knows(settings) else _SLACK_OF_NEW
        if times * (1 - slack) >= 1:
            return f"not compiled: modelled {times:.2f} times the time of the best"
        return "not compiled: the budget was spent"

    def _too_large(self, settings: ShardingSettings) -> str:
        found = self._found.get(settings)
        hbm = found.hbm if found and found.hbm else self._estimate(settings).hbm
        said = "does not fit" if found else "would not fit"
        what = f"{said}: {hbm / GIB:.1f} of {self.capacity / GIB:.1f} GiB"
        if found and not found.hbm:
            what = f"{said}: the compiler gave up before it knew how much it needs"
        remedy = would_give(settings, self.estimates, self.correction, self.capacity)
        return f"{what}; {remedy}" if remedy else what


def _rank(trial: Trial, best: ShardingSettings | None) -> tuple[int, float]:
    if trial.settings == best:
        return 0, 0.0
    if trial.measured is not None:
        return (1 if trial.measured.fits else 2), trial.per_sample
    return 3, trial.per_sample


def worth_keeping(
    settings: ShardingSettings,
    facts: StepFacts,
    estimate: Callable[[ShardingSettings], Estimate],
    capacity: float,
) -> ShardingSettings:
    """``settings``, which keep nothing of it, with what pays; themselves if nothing does.

    ``facts``: of the model with these settings. ``capacity``: bytes of HBM that there are.
    """
    if settings.keep or settings.kept_blocks or settings.units == "model" or not facts.blocks:
        return settings
    if settings.scan_prefetch:
        # Caution, not known: both loops that were planned with both took longer, but other settings
        # changed with them (ViT-10B on v5litepod-256, LLaMA 8B on v6e-64: benchmarks/LOG.md).
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
    """``keeping`` some of ``count`` things, by their numbers in order."""
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
    """What ``kept_blocks`` calls each unit but the outermost, which keeps its parameters anyway."""
    if settings.units != "blocks":
        return [(unit.name,) for unit in facts.blocks]
    count, size = len(facts.blocks), settings.blocks_per_unit
    return [tuple(range(first, min(first + size, count))) for first in range(0, count, size)]
