"""Model the time of a scheduled program: compute, collectives, and how much of them overlaps.

Two lanes. The compute lane executes the schedule in order, each operation for the compiler's
``estimated_cycles`` at the TensorCore's clock (``Chip.clock_hz``), a Pallas kernel for what
``program/flops.py`` makes of its own statement; operations without an estimate take no time. The
links are one lane too: collectives run one after the other, in the order of their starts, for what
``links.py`` says; only permutes that share no link run at once. Compute waits for a synchronous
collective at its place and for an asynchronous one where it is done; one inside a fusion runs
beside the computation of the fusion, which takes as long as the longer of them. What crosses from
slice to slice has a lane of its own, the data-center network. Copies to the host and copies back
are one lane each, at the bandwidth of PCIe; compute waits for them where they are done.
docs/design/time-model.md holds the figures against published ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..tpu.links import Links
from ..tpu.topology import Slice
from .records import Collective, HostCopy, Op, Schedule, Slot, Timing

# The kinds of events at one place of the schedule, in the order in which they happen.
_WAIT, _START, _BLOCK, _COMPUTE, _JOIN = range(5)
# Simulated iterations of a loop; all others take as long as the last of them.
_PLAYED = 2


def time_step(
    schedule: Schedule,
    slice: Slice,
    model_flops: float,
    host_link: tuple[float, float] | None = None,
) -> Timing:
    """Model the time of one step of ``schedule`` on ``slice``, in seconds.

    ``model_flops``: floating-point operations of the model in a step on this device, for the model
    FLOPs utilisation (MFU). Recomputation does not count (Chowdhery et al., "PaLM",
    arXiv 2204.02311, appendix B). The peak is that of bfloat16, ``Chip.device_flops``.

    A loop body is a sequence of places that execute equally often. Its first iterations are
    simulated; in ``Timing.slots`` the others are one slot in each lane.

    ``host_link``: bytes a second from a device to the host and back; default: the published figure.

    Raises ValueError for a collective of ranks that the slice does not have.
    """
    lanes = _Lanes(schedule, slice, host_link or (slice.chip.device_host_bandwidth,) * 2)
    for times, body in groupby(_events(schedule), key=lambda event: event.what.times):
        lanes.play(list(body), times)
    compute = sum(op.cycles * op.times for op in schedule.ops) / slice.chip.clock_hz
    collective = sum(lanes.seconds(c) * c.times for c in schedule.collectives) - lanes.at_once
    # The compute lane only ever waits while the links are busy.
    exposed = min(max(0.0, lanes.clock - compute - lanes.copies), collective)
    step = compute + exposed + lanes.copies
    return Timing(
        compute=compute,
        collective=collective,
        overlapped=collective - exposed,
        exposed=exposed,
        step=step,
        model_flops=model_flops,
        mfu=model_flops / (step * slice.chip.device_flops) if step else 0.0,
        slots=tuple(lanes.slots),
        copies=lanes.copies,
    )


@dataclass(frozen=True)
class _Event:
    index: int
    order: int
    what: Op | Collective | HostCopy


def _events(schedule: Schedule) -> list[_Event]:
    return sorted(_unsorted(schedule), key=lambda event: (event.index, event.order))


def _unsorted(schedule: Schedule) -> Iterator[_Event]:
    for op in schedule.ops:
        yield _Event(op.index, _COMPUTE, op)
    for collective in schedule.collectives:
        yield _Event(collective.index, _START, collective)
        if collective.asynchronous and collective.done > collective.index:
            yield _Event(collective.done, _WAIT, collective)
        else:
            yield _Event(collective.index, _JOIN if collective.fused else _BLOCK, collective)
    for copy in schedule.host_copies:
        yield _Event(copy.index, _START, copy)
        yield _Event(copy.done, _WAIT if copy.done > copy.index else _BLOCK, copy)


class _Lanes:
    """The current times of compute (``clock``) and of the links, in seconds from the start.

    A link that a permute used since all were in use is free at its ``_link_free``, every other at
    ``_free``. ``at_once``: seconds by which the times of collectives overlap. ``copies``: seconds
    that compute waited for copies to and from the host.
    """

    def __init__(self, schedule: Schedule, slice: Slice, host_link: tuple[float, float]) -> None:
        self.clock = 0.0
        self.slots: list[Slot] = []
        self.at_once = 0.0
        self.copies = 0.0
        self._host_free = {True: 0.0, False: 0.0}  # to the host, and back
        self._free = 0.0
        self._between_free = 0.0
        self._link_free: dict[Hashable, float] = {}
        self._hertz = slice.chip.clock_hz
        links = Links(slice)
        self._seconds = {id(c): links.seconds(c) for c in schedule.collectives}
        self._used = {id(c): links.used(c) for c in schedule.collectives}
        rates = {True: host_link[0], False: host_link[1]}
        self._seconds |= {id(c): c.bytes / rates[c.to_host] for c in schedule.host_copies}
        self._ends: dict[int, float] = {}

    def seconds(self, collective: Collective) -> float:
        return self._seconds[id(collective)]

    def play(self, body: Sequence[_Event], times: int) -> None:
        """Execute a stretch of the schedule ``times`` over."""
        clock = free = at_once = copies = 0.0
        host = self._host_free
        for _ in range(min(times, _PLAYED)):
            clock, free, at_once = self.clock, self._all_free(), self.at_once
            copies, host = self.copies, dict(self._host_free)
            for event in body:
                self._happen(event)
        if (left := times - _PLAYED) > 0:
            moved = {way: free - host[way] for way, free in self._host_free.items()}
            self._skip(body, left, self.clock - clock, self._all_free() - free, moved)
            self.at_once += left * (self.at_once - at_once)
            self.copies += left * (self.copies - copies)

    def _skip(
        self,
        body: Sequence[_Event],
        count: int,
        clock: float,
        free: float,
        host: Mapping[bool, float],
    ) -> None:
        """Let ``count`` more iterations pass, which take as long as the last one."""
        label, index = f"{count} more iterations", body[0].index
        begin, begin_free = self.clock, self._all_free()
        self.clock += count * clock
        self._free += count * free
        self._between_free += count * free
        self._link_free = {link: at + count * free for link, at in self._link_free.items()}
        for way, moved in host.items():
            self._host_free[way] += count * moved
        for event in body:  # what is waited for only after the loop
            if event.order == _START:
                what = event.what
                self._ends[id(what)] += count * (
                    host[what.to_host] if isinstance(what, HostCopy) else free
                )
        phases = {event.what.phase for event in body if not isinstance(event.what, HostCopy)}
        phase = phases.pop() if len(phases) == 1 else ""
        self.slots.append(Slot("compute", begin, self.clock, index, label, phase=phase))
        if free > 0:
            lane = ("collective", begin_free, self._all_free())
            self.slots.append(Slot(*lane, index, label, phase=phase))

    def _happen(self, event: _Event) -> None:
        what = event.what
        if isinstance(what, Op):
            begin, self.clock = self.clock, self.clock + what.cycles / self._hertz
            if what.cycles:
                self._slot("compute", begin, self.clock, what)
        elif isinstance(what, HostCopy):
            if event.order == _START:
                begin = max(self.clock, self._host_free[what.to_host])
                end = self._ends[id(what)] = begin + self._seconds[id(what)]
                self._host_free[what.to_host] = end
            else:
                self.copies += max(0.0, self._ends[id(what)] - self.clock)
                self.clock = max(self.clock, self._ends[id(what)])
        elif event.order == _START:
            between = what.across_slices
            free = self._between_free if between else self._free_at(self._used[id(what)])
            begin = max(self.clock, free)
            end = self._ends[id(what)] = begin + self._seconds[id(what)]
            self.at_once += max(0.0, min(end, self._all_free()) - begin)
            if between:
                self._between_free = end
            else:
                self._take(self._used[id(what)], end)
            self._slot("collective", begin, end, what)
        else:
            self.clock = max(self.clock, self._ends.get(id(what), 0.0))

    def _all_free(self) -> float:
        return max(self._free, self._between_free, *self._link_free.values())

    def _links_free(self) -> float:
        return max(self._free, *self._link_free.values(), 0.0)

    def _free_at(self, links: frozenset[Hashable] | None) -> float:
        """When ``links`` are free; ``None`` means all."""
        if links is None:
            return self._links_free()
        return max((self._link_free.get(link, self._free) for link in links), default=self._free)

    def _take(self, links: frozenset[Hashable] | None, until: float) -> None:
        if links is None:
            self._free, self._link_free = until, {}
        else:
            self._link_free.update(dict.fromkeys(links, until))

    def _slot(self, lane: str, begin: float, end: float, what: Op | Collective) -> None:
        asynchronous = isinstance(what, Collective) and what.asynchronous
        self.slots.append(
            Slot(lane, begin, end, what.index, what.name, what.module, what.phase, asynchronous)
        )
