"""Chooses the candidates to compile, one after the other, and ranks the results.

Deep models are first extrapolated from programs of few blocks; the fastest candidate is then
compiled with all of them. Inputs are offloaded only where nothing fits without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...tpu.topology import Slice, resolve, slice_names
from ...wording import first_line
from ..compiling.compiler import CompileError
from ..reporting.tables import GIB
from .estimate import Estimate, Estimates, kind_of
from .settings import ShardingSettings, describe_changes
from .space import Space, main_of, plainness

# A candidate is not compiled if its estimate is slower than the best by more than this share; the
# second is for kinds that were not compiled yet.
_SLACK, _SLACK_OF_NEW = 0.05, 0.1
# A candidate is not compiled if its estimate needs more than this multiple of HBM; same order.
_OVER, _OVER_OF_NEW = 1.1, 1.5
# Times that differ by less count as equal: the model is not more exact.
_EQUAL = 1e-3
# If estimates differ by less, the candidate closest to the defaults is compiled first.
_CLOSE = 1e-2
_EXTRAPOLATED = 2  # compilations


class ImpossibleError(RuntimeError):
    """The step cannot be traced with some settings."""


@dataclass(frozen=True)
class Measured:
    """A compiled step on one device.

    ``seconds``: 0 if it does not fit; ``hbm``: bytes that must be free, 0 if unknown.
    ``extrapolated``: from ``compilations`` programs with few blocks. ``host_memory``: peak bytes of
    the compiler's process; 0 if unknown.
    """

    seconds: float
    compute: float
    exposed: float
    hbm: float
    fits: bool
    mfu: float
    compile_seconds: float
    from_cache: bool = False
    extrapolated: bool = False
    compilations: int = 1
    warnings: tuple[str, ...] = ()
    host_memory: float = 0


def extrapolate(found: Sequence[Measured], depths: Sequence[int], blocks: int) -> Measured:
    first, second = found
    ahead = (blocks - depths[0]) / (depths[1] - depths[0])

    def of(figure: Callable[[Measured], float]) -> float:
        return figure(first) + ahead * (figure(second) - figure(first))

    fits = first.fits and second.fits
    seconds = of(lambda one: one.seconds) if fits else 0.0
    return Measured(
        seconds=seconds,
        compute=of(lambda one: one.compute) if fits else 0.0,
        exposed=of(lambda one: one.exposed) if fits else 0.0,
        hbm=of(lambda one: one.hbm) if first.hbm and second.hbm else 0.0,
        fits=fits,
        mfu=of(lambda one: one.mfu * one.seconds) / seconds if seconds else 0.0,
        compile_seconds=first.compile_seconds + second.compile_seconds,
        from_cache=first.from_cache and second.from_cache,
        extrapolated=True,
        compilations=2,
        warnings=second.warnings,
        host_memory=of(lambda one: one.host_memory) if first.host_memory else 0,
    )


@dataclass(frozen=True)
class Trial:
    """``measured``: None if not compiled. ``rejected``: why it is not the result, or "". ``tried``:
    whether it was traced, perhaps with an error.
    """

    settings: ShardingSettings
    estimate: Estimate
    measured: Measured | None = None
    rejected: str = ""
    tried: bool = False

    @property
    def per_sample(self) -> float:
        """Seconds per sample of a device's batch; per step if no batch was searched."""
        seconds = self.measured.seconds if self.measured else self.estimate.seconds
        return seconds / (self.settings.batch or 1)


@dataclass
class Search:
    """Compiles the most promising candidates, best first.

    Args:
        measure: compiles a step with settings; with ``True``, with all of its blocks. Raises
            ImpossibleError or CompileError; anything else ends the search.
        capacity: bytes of HBM that a step may take.
        budget: how many compilations, with those from the cache.
        own: the caller's step without settings, or None; ``own_batch``: its samples per device.
        host_memory: bytes that the compiler may take; a candidate that needs more with all blocks
            stays extrapolated.
    """

    space: Space
    estimates: Estimates
    measure: Callable[[ShardingSettings, bool], Measured]
    capacity: float
    budget: int
    say: Callable[[str], None] = lambda text: None
    own: Measured | None = None
    own_batch: int = 1
    compilations: int = 0
    host_memory: float = math.inf
    _found: dict[ShardingSettings, Measured] = field(default_factory=dict)
    _impossible: dict[ShardingSettings, str] = field(default_factory=dict)

    def run(self) -> list[Trial]:
        """All candidates: first the result, then those that fit, fastest first, then the others."""
        candidates = self.space.main()
        while one := self._choose(candidates):
            self._try(*one)
        best = self.answer()
        trials = [
            self._trial(one, self._why_not(one, best))
            for one in dict.fromkeys([*candidates, *self._found, *self._impossible])
        ]

        def rank(trial: Trial) -> tuple[int, float]:
            if trial.settings == best:
                return 0, 0.0
            fits = trial.measured is not None and trial.measured.fits
            return (1 if fits else 2 if trial.measured else 3), trial.per_sample

        return sorted(trials, key=rank)

    @property
    def _own_per_sample(self) -> float:
        """Seconds of the caller's step; infinite if there is none, or it does not fit."""
        fits = self.own is not None and self.own.fits
        return self.own.seconds / self.own_batch if self.own is not None and fits else math.inf

    def answer(self) -> ShardingSettings | None:
        """The fastest candidate compiled with all blocks, or ``None`` if the caller's own step is
        as fast. Without an own step that fits it may be extrapolated.
        """
        best = self.best(checked=True)
        if best is None and math.isinf(self._own_per_sample):
            best = self.best() or self._fastest(self._found)
        if best is None:
            return None
        faster = self._trial(best).per_sample < (1 - _EQUAL) * self._own_per_sample
        return best if faster else None

    def best(self, checked: bool = False) -> ShardingSettings | None:
        """The compiled candidate that fits and is fastest per sample, of equal ones the closest to
        the defaults. ``checked``: only those compiled with all blocks. Others count only if this
        machine can compile them with all.
        """
        return self._fastest(
            one for one, found in self._found.items()
            if not (checked and found.extrapolated or self._cannot_be_checked(found))
        )  # fmt: skip

    def _cannot_be_checked(self, found: Measured) -> bool:
        """Whether this machine lacks the memory to compile all blocks of an extrapolated step."""
        return found.extrapolated and found.host_memory > self.host_memory

    @property
    def _lacks_memory(self) -> bool:
        """Whether this machine cannot compile all blocks without a loop."""
        return any(map(self._cannot_be_checked, self._found.values()))

    def _fastest(self, candidates: Iterable[ShardingSettings]) -> ShardingSettings | None:
        fitting = {one: self._trial(one).per_sample for one in candidates if self._found[one].fits}
        bar = (1 + _EQUAL) * min(fitting.values(), default=0.0)
        return min((one for one, time in fitting.items() if time <= bar), key=plainness,
                   default=None)  # fmt: skip

    def _trial(self, settings: ShardingSettings, rejected: str = "") -> Trial:
        estimate, found = self.estimates.corrected(settings), self._found.get(settings)
        tried = found is not None or settings in self._impossible
        return Trial(settings, estimate, found, rejected, tried)

    def _choose(
        self, candidates: Sequence[ShardingSettings]
    ) -> tuple[ShardingSettings, bool] | None:
        """The next candidate to compile, and whether with all of its blocks."""
        left, best = self.budget - self.compilations, self.best()
        unchecked = best is not None and self._found[best].extrapolated
        faster = best is not None and self._trial(best).per_sample < self._own_per_sample
        if left > unchecked and (one := self._next(candidates)):
            return one, left < _EXTRAPOLATED + 1 and (one.scan or not self._lacks_memory)
        return (best, True) if left > 0 and best is not None and unchecked and faster else None

    def _next(self, candidates: Sequence[ShardingSettings]) -> ShardingSettings | None:
        best = self.best()
        too_large = [one for one, found in self._found.items() if not found.fits]
        around = self.space.around(best, self.estimates) if best else []
        several = [
            with_worthwhile_keeps(one, self.estimates, self.capacity, too_large)
            for one in candidates
            if self.space.chooses_keep
        ]
        every = list(dict.fromkeys([*candidates, *several, *around]))
        offload = not any(self._fits(one) for one in every if not one.offload)
        left = [
            one for one in every
            if one not in self._found and one not in self._impossible
            and self._may_fit(one) and (offload or not one.offload)
        ]  # fmt: skip
        extrapolates = self.budget - self.compilations >= _EXTRAPOLATED
        if self._lacks_memory and (True in self.space.values["scan"] or not extrapolates):
            left = [one for one in left if one.scan]
        if best is None:
            # The defaults of a script, then with the one change with which they would fit, so the
            # result is never slower than these.
            first = candidates[0]
            fits = with_remedy(first, self.estimates, self.capacity)
            at_hand = next((one for one in (first, fits) if one in left), None)
            if at_hand is not None:
                return at_hand
        else:
            fastest = min(self._trial(best).per_sample, self._own_per_sample)
            left = [one for one in left if self._modelled(one) * self._certainty(one) < fastest]
        times = {one: self._modelled(one) for one in left}
        bar = (1 + _CLOSE) * min(times.values(), default=0.0)
        close = (one for one in left if times[one] <= bar)
        return min(close, key=lambda one: (plainness(one), times[one]), default=None)

    def _modelled(self, settings: ShardingSettings) -> float:
        """Estimated seconds per sample; a variant of the best is scaled by its measured time."""
        found, best = self._trial(settings).per_sample, self.best()
        if best is None or main_of(settings) != main_of(best):
            return found
        guessed = Trial(best, self.estimates.corrected(best)).per_sample
        return found * self._trial(best).per_sample / guessed

    def _certainty(self, settings: ShardingSettings) -> float:
        return 1 - (_SLACK if self.estimates.knows(settings) else _SLACK_OF_NEW)

    def _may_fit(self, settings: ShardingSettings) -> bool:
        over = _OVER if self.estimates.knows(settings) else _OVER_OF_NEW
        enough = self.estimates.needed(settings) <= over * self.capacity
        return enough and self._smaller_that_failed(settings) is None

    def _smaller_that_failed(self, settings: ShardingSettings) -> ShardingSettings | None:
        """A candidate that was compiled and does not fit, though it computes blocks in the same way
        and needs at most as much memory by the estimates."""
        needed = self.estimates.needed(settings)
        failed = (one for one, found in self._found.items() if not found.fits and one != settings)
        alike = (one for one in failed if kind_of(one) == kind_of(settings))
        return next((one for one in alike if self.estimates.needed(one) <= needed), None)

    def _fits(self, settings: ShardingSettings) -> bool:
        """Whether the step fits, as far as is known."""
        if settings in self._impossible:
            return False
        found = self._found.get(settings)
        return found.fits if found else self.estimates.needed(settings) <= self.capacity

    def _try(self, settings: ShardingSettings, full: bool) -> None:
        before = self._found.pop(settings, None)
        try:
            found = self.measure(settings, full)
            self._found[settings] = found
            if before is not None:
                self._correct(settings, found.seconds / before.seconds)
        except CompileError as error:
            self.compilations += 1
            said = self._impossible[settings] = f"the compiler failed: {first_line(error)}"
        except ImpossibleError as error:
            said = self._impossible[settings] = f"not possible: {first_line(error)}"
        else:
            self.compilations += found.compilations
            # What a FINE setting changes says nothing of candidates that do not have it.
            if self.space.is_main(settings) or not self.estimates.knows(settings):
                self.estimates.learn(settings, found.hbm, found.compute, found.exposed)
            best = self.best()
            fastest = "the fastest so far" if settings == best else f"slower than {best}"
            how = " (extrapolated)" if found.extrapolated else ""
            if self._cannot_be_checked(found):
                fastest = self._why_not(settings, best)
            said = f"{1e3 * found.seconds:.2f} ms{how}, {fastest}"
            if not found.fits:
                said = self._too_large(settings)
        self.say(f"{self.compilations} of {self.budget} compilations: {settings}: {said}")

    def _correct(self, settings: ShardingSettings, ratio: float) -> None:
        """Apply the result of all blocks over its extrapolation to others of the same kind."""
        for one, found in self._found.items():
            if ratio and found.extrapolated and kind_of(one) == kind_of(settings):
                self._found[one] = replace(
                    found, seconds=ratio * found.seconds, compute=ratio * found.compute,
                    exposed=ratio * found.exposed,
                )  # fmt: skip

    def _why_not(self, settings: ShardingSettings, best: ShardingSettings | None) -> str:
        if settings == best:
            return ""
        if settings in self._impossible:
            return self._impossible[settings]
        found = self._found.get(settings)
        fitting = (one for one, other in self._found.items() if other.fits and not one.offload)
        if found is None and settings.offload and any(fitting):
            return "not compiled: offload is for steps that do not fit without it"
        if found is not None and not found.fits or found is None and not self._may_fit(settings):
            return self._too_large(settings)
        fastest = self._own_per_sample if best is None else self._trial(best).per_sample
        times = self._trial(settings).per_sample / fastest
        if found is not None and self._cannot_be_checked(found):
            need, have = found.host_memory / GIB, self.host_memory / GIB
            return (
                f"not compiled with all blocks: the compiler would take about {need:.0f} GiB of "
                f"host memory, and {have:.0f} GiB are free"
            )
        if found is not None and found.extrapolated and times <= 1 + _EQUAL:
            return "not compiled with all blocks: the budget was spent"
        if found is not None:
            as_fast = " as your own step" if best is None else ", and further from the defaults"
            slower = f"{times:.2f} times the time of the best"
            return slower if times > 1 + _EQUAL else f"as fast{as_fast}"
        if times * self._certainty(settings) >= 1:
            return f"not compiled: modelled {times:.2f} times the time of the best"
        return "not compiled: the budget was spent"

    def _too_large(self, settings: ShardingSettings) -> str:
        found = self._found.get(settings)
        said = "does not fit" if found else "would not fit"
        hbm = found.hbm if found else self.estimates.needed(settings)
        what = f"{said} {too_much(hbm, self.capacity)}"
        smaller = self._smaller_that_failed(settings)
        if hbm <= self.capacity and smaller is not None:
            what = f"{said}: needs more memory than {smaller}, which does not fit"
        if not hbm:
            what = f"{said}: the compiler stopped before it knew the required memory"
        other = with_remedy(settings, self.estimates, self.capacity)
        if other is None:
            return what
        hbm = self.estimates.needed(other)
        return f"{what}; with {describe_changes(other, settings)} it would need {hbm / GIB:.1f} GiB"


def too_much(hbm: float, capacity: float) -> str:
    excess = max(hbm - capacity, 0.0) / GIB
    return f"by {excess:.1f} GiB: {hbm / GIB:.1f} of {capacity / GIB:.1f} GiB"


def with_worthwhile_keeps(
    settings: ShardingSettings,
    estimates: Estimates,
    capacity: float,
    too_large: Collection[ShardingSettings] = (),
) -> ShardingSettings:
    """``settings`` with the values of ``keep`` that save time and fit, most time per byte first.

    ``too_large``: settings that were compiled and do not fit.
    """
    # A precaution: both models planned with keep and scan_prefetch were slower, but other settings
    # differed as well (benchmarks/LOG.md).
    blocks = estimates.facts(settings).blocks
    if settings.keep or settings.scan_prefetch or not settings.scan or not blocks:
        return settings
    plain, order = estimates.corrected(settings), [one.name for one in blocks[0].again]
    worth = []
    for name in order:
        one = estimates.corrected(settings.changed(keep=(name,)))
        if (saved := plain.seconds - one.seconds) > 0:
            worth.append((saved / max(one.hbm - plain.hbm, 1.0), name))
    alike = (one for one in too_large if one.keep and one.changed(keep=()) == settings)
    limit, chosen = min(map(estimates.needed, alike), default=math.inf), settings
    for _, name in sorted(worth, reverse=True):
        more = chosen.changed(keep=tuple(sorted((*chosen.keep, name), key=order.index)))
        if (needed := estimates.needed(more)) <= capacity and needed < limit:
            chosen = more
    return chosen


def with_remedy(
    settings: ShardingSettings, estimates: Estimates, capacity: float
) -> ShardingSettings | None:
    changes = _variants(settings, bool(estimates.facts(settings).blocks))
    return next((one for one in changes if estimates.needed(one) <= capacity), None)


def _variants(settings: ShardingSettings, blocks: bool) -> Iterator[ShardingSettings]:
    if blocks and settings.units == "model":
        yield settings.changed(units="blocks")
    if blocks and settings.recompute != "all":
        yield settings.changed(recompute="all")
    if settings.reshard_after_forward is not True or settings.kept_blocks:
        yield settings.changed(reshard_after_forward=True, kept_blocks=0)
    if settings.keep:
        yield settings.changed(keep=())
    if settings.shard_group_size is not None:
        yield settings.changed(shard_group_size=None)
    if blocks and not settings.offload:
        yield settings.changed(recompute="all", offload=True, units="blocks", kept_blocks=0)


def what_would_fit(
    settings: ShardingSettings, estimates: Estimates, where: Slice, capacity: float
) -> list[str]:
    """Advice where no candidate fits: a smaller batch or a larger slice, if one is enough."""
    facts = estimates.facts(settings)
    lean = settings.changed(
        reshard_after_forward=True, kept_blocks=0, keep=(), shard_group_size=None
    )
    if facts.blocks:
        lean = lean.changed(units="blocks", recompute="all", offload=True)
    advice = [
        f"The least estimated memory is {estimates.needed(lean) / GIB:.1f} of "
        f"{capacity / GIB:.1f} GiB a device (with {lean})."
    ]
    smaller = (settings.batch or 1) // 2
    while smaller >= 1:
        hbm = estimates.needed(lean.changed(batch=smaller))
        if hbm <= capacity:
            advice.append(f"A batch of {smaller} samples a device would need {hbm / GIB:.1f} GiB.")
            break
        smaller //= 2
    slices = map(resolve, slice_names())  # the smallest first
    for slice_ in (one for one in slices if one.chip == where.chip and one.devices > where.devices):
        hbm = estimates.on(slice_).needed(lean)
        if hbm <= capacity:
            advice.append(
                f"{slice_.name}, with the same batch a device, would need {hbm / GIB:.1f} GiB: the "
                f"smallest {slice_.chip.family} slice that is large enough."
            )
            break
    else:
        advice.append(f"No {where.chip.family} slice is large enough for this batch a device.")
    return advice
