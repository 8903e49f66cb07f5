"""Models the time of a scheduled program: compute, collectives, and how much of them overlaps.

Operations without an estimate take no time. Collectives run one after the other, except permutes
that share no link; compute waits for them where they are done. Collectives between slices and
copies to and from the host have lanes of their own. See docs/design/time-model.md.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

from ..tpu.links import Links
from ..tpu.topology import Slice
from .records import CompiledCollective, HostCopy, Op, Schedule, Slot, Timing

# Events at one place of the schedule, in order.
_WAIT, _START, _BLOCK, _COMPUTE = range(4)
_COPY = {True: "copies to the host", False: "copies from the host"}
# Simulated iterations of a loop; the others are assumed to take as long as the last of them.
_PLAYED = 2


def time_step(
    schedule: Schedule,
    slice: Slice,
    model_flops: float,
    host_link: tuple[float, float] | None = None,
    links: Links | None = None,
) -> Timing:
    """Model the time of one step of ``schedule`` on ``slice``, in seconds.

    ``model_flops``: of a step on this device, for the model FLOPs utilisation (MFU; Chowdhery et
    al., "PaLM", arXiv 2204.02311, appendix B), over the bfloat16 peak. ``host_link``: bytes per
    second from a device to the host and back; default: as published. ``links``: those of ``slice``.

    Raises ValueError for a collective of ranks that the slice does not have.
    """
    host_link = host_link or (slice.chip.device_host_bandwidth,) * 2
    lanes = _Lanes(schedule, slice, host_link, links or Links(slice))
    for times, body in groupby(_events(schedule), key=lambda event: event[2].times):
        lanes.play(list(body), times)
    compute = sum(op.cycles * op.times for op in schedule.ops) / slice.chip.clock_hz
    busy = sum(lanes.seconds[id(c)] * c.times for c in schedule.collectives)
    collective, copies = busy - lanes.now[_AT_ONCE], lanes.now[_COPIES]
    exposed = min(max(0.0, lanes.now[_COMPUTE_LANE] - compute - copies), collective)
    step = compute + exposed + copies
    return Timing(
        compute=compute,
        collective=collective,
        overlapped=collective - exposed,
        exposed=exposed,
        step=step,
        model_flops=model_flops,
        mfu=model_flops / (step * slice.chip.device_flops) if step else 0.0,
        slots=tuple(lanes.slots),
        copies=copies,
    )


_ScheduledEvent = tuple[int, int, Op | CompiledCollective | HostCopy]  # place, order there


def _events(schedule: Schedule) -> list[_ScheduledEvent]:
    events: list[_ScheduledEvent] = [(op.index, _COMPUTE, op) for op in schedule.ops]
    transfers: list[CompiledCollective | HostCopy] = [*schedule.collectives, *schedule.host_copies]
    for one in transfers:
        later = one.done > one.index and (isinstance(one, HostCopy) or one.asynchronous)
        wait = (one.done, _WAIT, one) if later else (one.index, _BLOCK, one)
        events += (one.index, _START, one), wait
    return sorted(events, key=lambda event: event[:2])


_COMPUTE_LANE, _LINKS, _BETWEEN, _ON_LINKS, _ANYWHERE = "compute", "links", "between", "all", "any"
_AT_ONCE, _COPIES = "at once", "copies"


class _Lanes:
    """``now``: until when each lane is in use, in seconds from the start.

    Further keys: links that a permute used alone; ``_ON_LINKS`` and ``_ANYWHERE``, the latest end
    of a collective in the slice, and of any; True and False, copies to the host and back; ids of
    collectives and copies, their ends; ``_AT_ONCE``, seconds in which collectives overlap;
    ``_COPIES``, seconds that compute waited for copies.
    """

    def __init__(
        self, schedule: Schedule, slice: Slice, host_link: tuple[float, float], links: Links
    ) -> None:
        self.now: dict[Hashable, float] = defaultdict(float)
        self.slots: list[Slot] = []
        self._hertz = slice.chip.clock_hz
        self.seconds = {id(c): links.seconds(c) for c in schedule.collectives}
        self._used = {id(c): links.used(c) for c in schedule.collectives}
        rates = {True: host_link[0], False: host_link[1]}
        self.seconds |= {id(c): c.bytes / rates[c.to_host] for c in schedule.host_copies}

    def play(self, body: Sequence[_ScheduledEvent], times: int) -> None:
        """Execute ``body`` ``times`` times; iterations that are not simulated become one slot in
        each lane (for compute: of each phase).
        """
        before: dict[Hashable, float] = {}
        for _ in range(min(times, _PLAYED)):
            if times > _PLAYED:
                before = dict(self.now)
            for _, order, what in body:
                self._happen(order, what)
        if times > _PLAYED:
            self._skip(body, times - _PLAYED, before)

    def _skip(
        self, body: Sequence[_ScheduledEvent], count: int, before: Mapping[Hashable, float]
    ) -> None:
        old = dict(self.now)
        for key, value in old.items():
            self.now[key] += count * (value - before.get(key, value))
        place = body[0][0], f"{count} more iterations"
        phases = {what.phase for _, _, what in body if isinstance(what, CompiledCollective)}
        phase = phases.pop() if len(phases) == 1 else ""
        for key, lane in ((_ANYWHERE, "collective"), *_COPY.items()):
            begin, end = old.get(key, 0.0), self.now[key]
            if end > begin:
                self.slots.append(Slot(lane, begin, end, *place, phase=phase))
        kinds: dict[tuple[str, bool], list[Op]] = defaultdict(list)
        for _, _, what in body:
            if isinstance(what, Op) and what.cycles:
                kinds[what.phase, what.recomputed].append(what)
        cycles = {kind: sum(op.cycles for op in ops) for kind, ops in kinds.items()}
        begin = old.get(_COMPUTE_LANE, 0.0)
        length = self.now[_COMPUTE_LANE] - begin
        for (phase, again), ops in kinds.items():
            end = begin + length * cycles[phase, again] / sum(cycles.values())
            module = ".".join(os.path.commonprefix([op.module.split(".") for op in ops]))
            self.slots.append(Slot("compute", begin, end, *place, module, phase, recomputed=again))
            begin = end

    def _happen(self, order: int, what: Op | CompiledCollective | HostCopy) -> None:
        now = self.now
        if isinstance(what, Op):
            begin = now[_COMPUTE_LANE]
            now[_COMPUTE_LANE] += what.cycles / self._hertz
            if what.cycles:
                self._slot("compute", begin, now[_COMPUTE_LANE], what)
        elif order == _START:
            self._start(what)
        else:
            end = max(now[_COMPUTE_LANE], now[id(what)])
            if isinstance(what, HostCopy):
                now[_COPIES] += end - now[_COMPUTE_LANE]
            now[_COMPUTE_LANE] = end

    def _start(self, what: CompiledCollective | HostCopy) -> None:
        now, used = self.now, self._used.get(id(what))
        waits: tuple[Hashable, ...]
        takes: tuple[Hashable, ...]
        if isinstance(what, HostCopy):
            waits = takes = (what.to_host,)
        elif what.across_slices:
            waits = takes = (_BETWEEN,)
        elif used is None:
            waits, takes = (_ON_LINKS,), (_LINKS, _ON_LINKS)
        else:
            waits, takes = (_LINKS, *used), (*used,)
        begin = max(now[_COMPUTE_LANE], *(now[lane] for lane in waits))
        end = now[id(what)] = begin + self.seconds[id(what)]
        now.update(dict.fromkeys(takes, end))
        if isinstance(what, HostCopy):
            lane = _COPY[what.to_host]
            later = what.done > what.index
            self.slots.append(Slot(lane, begin, end, what.index, lane, asynchronous=later))
        else:
            now[_AT_ONCE] += max(0.0, min(end, now[_ANYWHERE]) - begin)
            now[_ANYWHERE] = max(now[_ANYWHERE], end)
            if not what.across_slices:
                now[_ON_LINKS] = max(now[_ON_LINKS], end)
            self._slot("collective", begin, end, what)

    def _slot(self, lane: str, begin: float, end: float, what: Op | CompiledCollective) -> None:
        asynchronous = isinstance(what, CompiledCollective) and what.asynchronous
        again = isinstance(what, Op) and what.recomputed
        place = what.index, what.name, what.module, what.phase
        self.slots.append(Slot(lane, begin, end, *place, asynchronous, again))
