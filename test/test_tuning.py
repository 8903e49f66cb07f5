"""``xla_fsdp.tune``: the settings, the search with a compiler that is made up, and a small one."""

import dataclasses
import io
import json
import random
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from on_ranks import raises, without_ranks
from planned import EMPTY, hlo
from torch import nn

from xla_fsdp import ShardingSettings, training_step, tune
from xla_fsdp.compiler_options import for_large_matmuls
from xla_fsdp.plan_compiler import find_compiler
from xla_fsdp.planning.compiling.compiler import CompileError, Target
from xla_fsdp.planning.compiling.plan_cache import CompiledStep
from xla_fsdp.planning.compiling.progress import Progress
from xla_fsdp.planning.tracing.units import OnWire
from xla_fsdp.planning.tuning.api import _extrapolated, _Steps
from xla_fsdp.planning.tuning.estimate import Estimates
from xla_fsdp.planning.tuning.facts import Again, StepFacts, UnitFacts
from xla_fsdp.planning.tuning.search import ImpossibleError, Measured, Search
from xla_fsdp.planning.tuning.space import Space, checked_search, plainness
from xla_fsdp.planning.tuning.tuning import Tuning
from xla_fsdp.tpu.calibration import Calibration, CalibrationError
from xla_fsdp.tpu.topology import resolve

GIB = 2**30
V3 = resolve("v3-8")
WIDTH, INNER, ROWS = 256, 1024, 512
HBM = 10 * GIB
AGAIN = (Again("q", 1e-3, 1e6), Again("up", 2e-3, 8e6), Again("attention", 1e-3, 5e5))
PLAIN = {"units": ["blocks"], "scan": [False], "recompute": ["none"], "shard_group_size": [None]}


def test_settings_go_through_json_and_a_file(tmp_path):
    every = ShardingSettings(
        batch=16, scan=True, recompute="all", offload=True, reshard_after_forward=4,
        shard_group_size=8, backward_prefetch="post", collective_routes="default",
        scoped_vmem_kib=98304,
    )  # fmt: skip
    by_number = ShardingSettings(kept_blocks=(0, 1, 6, 7))
    by_name = ShardingSettings(units=1000, kept_blocks=("layer4", "fc"))
    assert str(by_number) == "kept_blocks=(0, 1, 6, 7)"
    assert str(by_name) == "units=1000, kept_blocks=('layer4', 'fc')"
    for settings in (every, by_number, by_name, ShardingSettings()):
        settings.save(tmp_path / "settings.json")
        assert ShardingSettings.load(tmp_path / "settings.json") == settings
        # Every file of the last release has this setting, which was removed.
        old = json.dumps({**json.loads(settings.to_json()), "blocks_per_unit": 1})
        assert ShardingSettings.from_json(old) == settings
    vmem = ShardingSettings(scoped_vmem_kib=98304).compiler_options
    assert every.compiler_options == vmem == for_large_matmuls("v6e")
    assert not ShardingSettings().compiler_options


@pytest.mark.parametrize(
    "change, message",
    [
        ({"remat": "all"}, r"'remat', which are no settings; allowed are batch, units"),
        ({"format": "xla_fsdp plan"}, "some other JSON: expected what tune wrote"),
        ({"version": 2}, "version 2, allowed is 1"),
        ({"blocks_per_unit": 2}, "here has blocks_per_unit, which was removed: .* Run tune again"),
        ({"units": "layers"}, r"here: units must be \"blocks\", \"model\" or a number.*'layers'"),
    ],
)
def test_a_file_of_something_else_is_refused(change, message, tmp_path):
    record = {**json.loads(ShardingSettings().to_json()), **change}
    with pytest.raises(ValueError, match=message):
        ShardingSettings.from_json(json.dumps(record), "here")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    raises(ValueError, "binary.json is not JSON", ShardingSettings.load, tmp_path / "binary.json")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch": 0}, "batch must be a number from 1 on, or None; got 0"),
        ({"recompute": True}, r'recompute must be "none", "all" or a number.*got True'),
        ({"reshard_after_forward": 1}, "reshard_after_forward must be True, False or .*; got 1"),
        ({"scan": 1}, "scan must be True or False; got 1"),
        ({"collective_routes": "fast"}, "collective_routes must be .*default.*got 'fast'"),
        ({"scan": True}, "scan=True and recompute='none' exclude each other"),
        ({"scan": True, "recompute": "all", "kept_blocks": 2}, "scan=True and kept_blocks=2"),
        ({"offload": True}, "offload=True and recompute='none' exclude each other"),
        ({"keep": ("up",)}, r"keep=\('up',\) and scan=False exclude each other"),
        ({"keep": "up"}, "keep must be a tuple of names; got 'up'"),
        ({"units": "model", "kept_blocks": 1}, "kept_blocks=1 and units='model'"),
        ({"units": 100, "kept_blocks": 1}, "kept_blocks=1 and units=100 exclude.*by names"),
        ({"kept_blocks": ("layer4",)}, "kept_blocks=.*layer4.* and units='blocks'"),
        ({"kept_blocks": [1]}, r"kept_blocks must be a number, or a tuple .*got \[1\]"),
        ({"kept_blocks": (1, 1)}, "kept_blocks must be a number, or a tuple"),
    ],
)
def test_wrong_settings_say_what_is_allowed(wrong, message):
    with pytest.raises(ValueError, match=message):
        ShardingSettings(**wrong)


def on_wire(elements):
    """Of 16 bits: a bias and a weight with rows of 1024."""
    return OnWire(2 * 1000, 8), OnWire(2 * (elements - 1000), elements // 1024)


def facts(blocks=8, held=GIB, state=8 * GIB, again=()):
    unit = UnitFacts(
        "", 10**6, 10**6, 2, on_wire(10**6), on_wire(10**6), 1e-3, held / 8, held / 8, held / 16,
        False,
    )  # fmt: skip
    block = dataclasses.replace(
        unit, elements=10**7, trainable=10**7, gathered=on_wire(10**7), reduced=on_wire(10**7),
        forward=5e-3, saved=held, saved_recomputed=held / 16, is_block=True,
        again=again,
    )  # fmt: skip
    several = tuple(dataclasses.replace(block, name=f"blocks.{n}") for n in range(blocks))
    return StepFacts((unit, *several), state, 1e6, 1)


class Compiler:
    """Says of each step what was estimated, times ``factor``. With ``deep``, figures are
    extrapolated, and wrong by that factor, until all is compiled."""

    def __init__(self, estimates, factor=lambda settings: 1.0, capacity=10 * GIB, deep=0.0):
        self.estimates, self.factor, self.capacity = estimates, factor, capacity
        self.asked, self.deep = [], deep
        self.change = lambda settings, found: found

    def __call__(self, settings, full):
        few = bool(self.deep) and not full
        self.asked.append((settings, full) if self.deep else settings)
        found = self.estimates.of(settings)
        factor = self.factor(settings) * (self.deep if few else 1.0)
        fits = found.hbm <= self.capacity
        times = (factor * found.compute, factor * found.exposed) if fits else (0.0, 0.0)
        figures = sum(times), *times, found.hbm, fits, 0.5, 1.0
        measured = Measured(*figures, extrapolated=few, compilations=1 + few)
        return self.change(settings, measured)


def made_up(step, budget=8, where=V3, batch=(None,), scans=True, fixed=None, capacity=HBM, **more):
    """A search with a made-up compiler, ``search.measure``. ``more``: other arguments of Search."""
    estimates = Estimates({"blocks": step}, where)
    space = Space.of(step, where, batch, scans, checked_search(fixed))
    compiler = Compiler(estimates, capacity=capacity)
    return Search(space, estimates, compiler, capacity, budget, **more)


def result_of(search, trials, samples=False):
    return Tuning(
        search.answer(), tuple(trials), "v3-8", 8, search.capacity, search.budget,
        search.compilations, 0, samples, own=search.own, own_batch=search.own_batch,
    )  # fmt: skip


def searched(held=GIB, budget=8, capacity=10 * GIB, factor=lambda settings: 1.0, **fixed):
    search = made_up(facts(held=held), budget, fixed=fixed, capacity=capacity)
    search.measure.factor = factor
    return search, search.run(), search.measure


def test_the_fastest_that_fits_is_found_and_nothing_that_does_not():
    search, trials, compiler = searched(held=2 * GIB, capacity=14 * GIB)
    every = [one for one in search.space.main() if compiler.estimates.of(one).hbm <= 14 * GIB]
    fastest = min(every, key=lambda one: compiler.estimates.of(one).seconds)
    best = trials[0].measured
    assert best.fits and best.hbm <= 14 * GIB
    assert best.seconds <= compiler.estimates.of(fastest).seconds * 1.05
    # Activations of all blocks do not fit: some must be recomputed, and not all need be.
    assert trials[0].settings.recompute == 4
    larger = [one for one in trials if one.measured is None and one.estimate.hbm > 14 * GIB]
    assert larger and all("would not fit by " in trial.rejected for trial in larger)
    kept = next(trial for trial in trials if trial.settings == ShardingSettings())
    assert "does not fit by " in kept.rejected or "would not fit by " in kept.rejected
    assert 'of 14.0 GiB; with recompute="all" it would need ' in kept.rejected


def with_own(seconds, fits=True, batch=1, budget=8):
    """A search beside a step of the caller's that takes ``seconds``, and what is said of it."""
    own = Measured(seconds, seconds, 0.0, 9 * GIB if fits else 12.5 * GIB, fits, 0.5, 1.0)
    search = made_up(facts(), budget, own=own, own_batch=batch, compilations=1)
    return search, result_of(search, search.run())


def no_room(found):
    return dataclasses.replace(found, fits=False, hbm=0.0)


def test_fewer_values_are_kept_where_the_compiler_has_no_room_for_those_estimated_to_fit():
    search = made_up(facts(again=AGAIN), fixed={"scan": [True], "shard_group_size": [None]})
    search.measure.change = lambda one, found: no_room(found) if len(one.keep) > 1 else found
    trials = search.run()
    kept = [one.keep for one in search.measure.asked if one.keep]
    assert kept == [("q", "up", "attention"), ("q", "attention"), ("attention",)]
    assert all(one.reshard_after_forward for one in search.measure.asked if one.keep)
    assert trials[0].settings.keep == ("attention",)


def test_what_needs_more_memory_than_a_step_that_did_not_fit_is_not_compiled():
    search = made_up(facts(), fixed={"scan": [True], "offload": [False]})
    search.measure.change = lambda one, found: no_room(found)
    trials = {trial.settings: trial for trial in search.run()}
    plain = ShardingSettings(scan=True, recompute="all")
    larger = plain.changed(reshard_after_forward=4)
    assert plain in search.measure.asked and larger not in search.measure.asked
    assert f"needs more memory than {plain}, which does not fit" in trials[larger].rejected


def test_an_own_step_is_the_answer_unless_settings_are_faster():
    search, found = with_own(seconds=1e-6)
    assert search.best() is not None and found.settings is None and found.best is None
    assert str(found).startswith("BEST: your own step as it is: 0.00 ms a step (model)")
    measured = [trial for trial in found.trials if trial.measured is not None]
    assert measured and all("times the time of the best" in trial.rejected for trial in measured)
    own = next(line for line in str(found).splitlines() if line.startswith("your own step"))
    assert own.endswith("best") and json.loads(found.to_json())["own"]["seconds"] == 1e-6
    _, found = with_own(seconds=10.0)
    assert found.settings is not None and found.best.measured.seconds < 10.0
    assert " times the time of your own step" in str(found).splitlines()[0]
    # Of a larger batch a sample is what counts.
    assert with_own(seconds=10.0, batch=10**6)[1].settings is None
    alike = with_own(seconds=found.best.measured.seconds)[1]
    assert alike.settings is None
    assert "as fast as your own step" in [trial.rejected for trial in alike.trials]


def test_an_own_step_that_does_not_fit_says_by_how_much():
    _, found = with_own(seconds=0.0, fits=False)
    assert found.settings is not None
    excess = "does not fit by 2.5 GiB: 12.5 of 10.0 GiB"
    first, *others = str(found).splitlines()
    assert f"your own step {excess}" in first and any(line.endswith(excess) for line in others)
    _, found = with_own(seconds=0.0, fits=False, budget=1)
    assert str(found).startswith("NOTHING FITS")


def test_inputs_go_to_the_host_only_where_nothing_fits_without():
    kept = ShardingSettings(recompute="all")
    found = Estimates({"blocks": facts(held=2 * GIB)}, V3)
    between = (found.of(kept).hbm + found.of(kept.changed(offload=True)).hbm) / 2
    fixed = {**PLAIN, "recompute": ["all"]}
    for capacity, offload in ((10 * GIB, False), (between, True)):
        _, trials, compiler = searched(held=2 * GIB, capacity=capacity, **fixed)
        assert any(one.offload for one in compiler.asked) == offload
        assert {one.recompute for one in compiler.asked} == {"all"}  # what the caller fixes
        assert trials[0].settings.offload == offload
        why = {trial.rejected for trial in trials if trial.settings.offload}
        assert ("not compiled: offload is for steps that do not fit without it" in why) != offload


def made_up_search(seed):
    """What a search finds in which each program takes a random time, fails, or does not fit; these
    times, and the programs."""
    draw = random.Random(seed)
    own_batch = draw.choice((1, 2))
    fixed = {"shard_group_size": [None], "offload": [False], "reshard_after_forward": [True, False]}
    search = made_up(facts(), batch=(1, 2), scans=draw.random() < 0.3, fixed=fixed)
    estimates = search.estimates
    deep, failing, true, asked = draw.random() < 0.9, draw.choice((0.1, 0.9)), {}, []

    def measure(settings, full):
        assert (settings, full) not in asked
        # Two programs of few blocks leave enough of the budget to compile all of them.
        assert full or search.budget - search.compilations > 2
        asked.append((settings, full))
        few = deep and not full and not settings.scan
        if draw.random() < (failing if full else 0.1):
            errors = ImpossibleError("no such block"), CompileError("out of memory")
            raise draw.choice(errors)
        fits = draw.random() < 0.9
        # What is extrapolated is too short or too long.
        true.setdefault(settings, estimates.of(settings).seconds * draw.uniform(0.5, 2))
        seconds = true[settings] * (draw.uniform(0.5, 3) if few else 1) if fits else 0.0
        return Measured(seconds, seconds, 0.0, 12 * GIB - 4 * GIB * fits, fits, 0.5, 1.0,
                        extrapolated=few, compilations=1 + few)  # fmt: skip

    seconds = estimates.of(ShardingSettings(batch=1)).seconds * draw.uniform(0.3, 8)
    fits, budget = draw.random() < 0.7, draw.choice((1, 2, 4, 6, 7, 8, 8))
    own = Measured(seconds * fits, seconds * fits, 0.0, GIB, fits, 0.5, 1.0)
    own = draw.choice((own, own, own, None))
    search = dataclasses.replace(
        search, measure=measure, budget=budget, own=own, own_batch=own_batch,
        compilations=int(own is not None),
    )  # fmt: skip
    return result_of(search, search.run(), samples=True), true, asked


def test_the_answer_is_never_slower_than_the_own_step():
    counts = Counter()
    for seed in range(100):
        found, true, asked = made_up_search(seed)
        assert found.compilations <= found.budget, seed
        # What a script does without settings is compiled first.
        assert not asked or asked[0][0] == ShardingSettings(batch=1), seed
        assert all(bool(one.rejected) == (one != found.best) for one in found.trials), seed
        best, own_fits = found.best, found.own is not None and found.own.fits
        first, *_ = str(found).splitlines()
        few = any(one.measured and one.measured.extrapolated for one in found.trials)
        assert ("(extrapolated)" in str(found)) == few, seed
        if best is None:
            said = "BEST: your own step" if own_fits else "NOTHING FITS"
            assert first.startswith(said), seed
        else:
            extrapolated = best.measured.extrapolated
            assert best.measured.fits and (not extrapolated or not own_fits), seed
            assert ("NOT compiled with all blocks" in first) == extrapolated, seed
            said = "extrapolated" if extrapolated else "checked"
        if best is not None and own_fits:
            a_sample = true[best.settings] / best.settings.batch
            assert a_sample < found.own.seconds / found.own_batch, seed
        counts[said, own_fits] += 1
    assert len(counts) == 5, counts


def test_where_the_check_fails_and_the_budget_is_spent_the_own_step_is_the_answer():
    def measure(settings, full):
        if full:
            raise CompileError("out of memory")
        return compiler(settings, full)

    for own, answered in ((Measured(1e3, 1e3, 0.0, GIB, True, 0.5, 1.0), False), (None, True)):
        search = made_up(facts(), budget=5, scans=False, own=own)
        compiler, search.measure = Compiler(search.estimates, deep=0.5), measure
        trials = search.run()
        assert search.compilations == 5 and any(trial.measured for trial in trials)
        assert (search.answer() is not None) == answered
        said = str(result_of(search, trials))
        assert ("extrapolated: it was NOT compiled" in said) == answered


@pytest.mark.parametrize("scans", [True, False])
def test_what_the_compiler_has_no_memory_for_is_not_compiled_with_all_blocks(scans):
    search, full_depth = made_up(facts(), scans=scans, host_memory=20 * GIB), []
    compiler = Compiler(search.estimates, deep=0.5)

    def measure(settings, full):
        found = compiler(settings, full or settings.scan)
        if found.extrapolated:
            return dataclasses.replace(found, host_memory=30 * GIB)
        full_depth.append(settings)
        return dataclasses.replace(found, host_memory=2 * GIB)

    search.measure = measure
    trials, answer = search.run(), search.answer()
    assert bool(full_depth) == scans and all(one.scan for one in full_depth)
    assert answer.scan if scans else trials[0].measured.extrapolated
    large = [one for one in trials if one.measured and one.measured.extrapolated]
    said = [search._why_not(one.settings, None) for one in large if one.measured.fits]
    assert said and all("about 30 GiB of host memory, and 20" in words for words in said)


def test_where_a_script_does_not_fit_what_is_next_at_hand_is_compiled_next():
    """And so is the answer where all that is modelled faster turns out slower."""
    at_hand = ShardingSettings(recompute="all")

    def slow(settings):
        return 1.0 if settings == at_hand else 2.0

    _, trials, compiler = searched(held=2 * GIB, budget=3, capacity=14 * GIB, factor=slow)
    assert compiler.asked[:2] == [ShardingSettings(), at_hand]
    assert len(compiler.asked) == 3 and trials[0].settings == at_hand


def test_a_deep_model_is_first_compiled_with_few_blocks():
    """Of 40 blocks a program of 2 and one of 4, if these compile faster than one of all."""
    asked, settings, cost, largest = [], ShardingSettings(), {40: 100.0}, {"that fits": 40}

    def compiled(name, step, host):
        depth = getattr(step(), "depth", 40)
        asked.append(depth)
        fits = depth <= largest["that fits"]
        figures = (1.0 + depth, depth, depth / 2, depth) if fits else (0.0,) * 4
        return Measured(*figures, fits, 0.5, cost.get(depth, 1.0))

    target = Target(V3, find_compiler(None), "xla_fsdp", {}, None, None)
    steps = _Steps(lambda settings: settings, target, None)
    steps.compile, steps.blocks = compiled, 40
    found = steps.measure(settings, False)
    assert asked == [2, 4] and found.extrapolated and found.compilations == 2
    figures = (found.seconds, found.compute, found.exposed, found.hbm, found.mfu)
    assert figures == pytest.approx((41.0, 40.0, 20.0, 40.0, 0.5)) and found.fits
    largest["that fits"] = 2
    found = steps.measure(settings, False)
    assert (found.fits, found.seconds) == (False, 0.0)
    largest["that fits"] = 40
    assert not steps.measure(settings, True).extrapolated and asked[4:] == [40]
    scanned = settings.changed(scan=True, recompute="all")
    for other in (scanned, settings.changed(recompute=20), settings.changed(kept_blocks=1)):
        assert not steps.measure(other, False).extrapolated and asked.pop() == 40
    cost[40] = 1.5  # 3 for all, so two of few take longer
    steps.measure(settings, True)
    assert not steps.measure(settings.changed(reshard_after_forward=False), False).extrapolated


@pytest.mark.parametrize(
    "error, left, blocks, note",
    [
        (None, 2, 40, "figures of 40 blocks are first extrapolated from 2 and 4 of them"),
        (None, 40, 0, "none can be left out: without them, 41 of 41 units are left"),
        (ImpossibleError("no such index"), 2, 0, "none can be left out: no such index"),
    ],
)
def test_which_models_are_extrapolated(error, left, blocks, note):
    trace = mock.Mock(side_effect=error, return_value=mock.Mock(units=[None] * (1 + left)))
    found, said = _extrapolated(trace, facts(blocks=40), 4)
    assert found == blocks and note in said
    assert _extrapolated(trace, facts(blocks=24), 4) == (0, "")


def test_progress_says_how_long_it_took_and_what_remains(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress(stream, 4)
    for seconds in (0, 30, 61):
        now[0] = seconds
        shown.update("compiling", seconds)
    with shown.while_compiling():
        now[0] = 141.0
        shown.done("compiling", 80)
    shown.update("compiling", 10)
    assert stream.getvalue().splitlines() == [
        "compiling, 1 of at most 4; 0:00 min so far …",
        "compiling, 1 of at most 4; 1:01 min so far …",
        "compiling: 80 s",
        "compiling, 2 of at most 4; 2:21 min so far, at most about 3:50 min remain …",
    ]


def test_of_equals_the_plainest():
    def alike(settings):
        return (1.0 + 0.001 * (settings == ShardingSettings())) / step.of(settings).seconds

    step = Estimates({"blocks": facts()}, V3)
    search, trials, compiler = searched(factor=alike)
    assert len(compiler.asked) > 1
    assert plainness(trials[0].settings) == min(map(plainness, compiler.asked))
    assert trials[0].settings == ShardingSettings()


def test_on_the_best_what_is_modelled_faster_is_tried_first():
    """The budget has one compilation for what is tried on the best of the rest."""
    tensors, where = (OnWire(20 << 20, 2**13),), resolve("v5litepod-16")
    step = facts(held=GIB / 100)
    units = [dataclasses.replace(one, gathered=tensors, reduced=tensors) for one in step.units]
    step = dataclasses.replace(step, units=tuple(units))
    for routes in (["default", "auto"], ["default"]):
        fixed = {**PLAIN, "reshard_after_forward": [False], "collective_routes": routes}
        search = made_up(step, budget=3, where=where, scans=False, fixed=fixed)
        search.run()
        first, *rest = search.measure.asked
        # Stages are faster. Without them: more VMEM, of which the analysis knows nothing, and
        # not gathers that wait.
        assert rest[0] == first.changed(
            **{"collective_routes": "auto"} if "auto" in routes else {"scoped_vmem_kib": 49152}
        )
        assert all(one.forward_prefetch for one in rest)


def test_of_those_modelled_alike_the_plainest_is_tried_first():
    fixed = {**PLAIN, "reshard_after_forward": [True, False], "shard_group_size": [None, 4]}
    fixed["kept_blocks"] = [0]
    search = made_up(facts(held=GIB / 100), budget=2, scans=False, fixed=fixed)
    estimates = search.estimates
    one = ShardingSettings(reshard_after_forward=False)
    two = one.changed(shard_group_size=4)
    modelled, of = {one: 1.0, two: 0.995}, estimates.of
    estimates.of = lambda settings: dataclasses.replace(
        of(settings), compute=modelled.get(settings, 2.0), exposed=1e-6
    )
    assert min(search.space.main(), key=lambda one: estimates.of(one).seconds) == two
    search.run()
    assert search.measure.asked == [ShardingSettings(), one]


def test_what_is_not_possible_costs_no_compilation_and_failures_do():
    def refuse(settings, full):
        if settings.units == "model":
            raise ImpossibleError("no such thing\nat all")
        if settings.reshard_after_forward is False:
            raise CompileError("the TPU compiler ended")
        return compiler(settings, full)

    search = made_up(facts(), budget=6)
    compiler, search.measure = search.measure, refuse
    trials = search.run()
    said = {trial.rejected for trial in trials if trial.measured is None}
    assert "not possible: no such thing" in said
    assert "the compiler failed: the TPU compiler ended" in said
    failed = sum(trial.rejected.startswith("the compiler failed") for trial in trials)
    assert search.compilations == len(compiler.asked) + failed <= 6
    assert trials[0].measured.fits


def test_a_fault_that_is_not_of_the_step_ends_the_search(monkeypatch):
    search = made_up(facts())
    search.measure = mock.Mock(side_effect=ValueError("not an HLO instruction"))
    raises(ValueError, "not an HLO instruction", search.run)

    step_without = mock.Mock(side_effect=IndexError("list index out of range"))
    monkeypatch.setattr("xla_fsdp.planning.tuning.api.trace_step", lambda step, *more: step())
    target = Target(V3, find_compiler(None), "xla_fsdp", {}, None, None)
    steps = _Steps(step_without, target, mock.MagicMock())
    with pytest.raises(ImpossibleError, match="list index out of range"):
        steps.measure(ShardingSettings(), True)
    with pytest.raises(IndexError):
        steps.trace(ShardingSettings())


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"step": None}, TypeError, "step must be a function of ShardingSettings"),
        ({"budget": 0}, ValueError, "budget must be a number of compilations from 1 on; got 0"),
        ({"batch": 0}, ValueError, "batch must be .*got 0"),
        ({"batch": []}, ValueError, r"batch must be .*got \[\]"),
        ({"batch": 4, "search": {"batch": [4]}}, ValueError, "exclude each other"),
        ({"baseline": 3}, TypeError, "baseline must be a function without arguments.*got 3"),
        ({"calibration": Calibration("v4")}, CalibrationError, "is of v4; the plan is for v3"),
        ({"search": {"remat": ["all"]}}, ValueError, "'remat', which is no setting; allowed are b"),
        ({"search": ["scan"]}, TypeError, r"search must have lists of values.*got \['scan'\]"),
        ({"search": {"scan": True}}, TypeError, r"search\['scan'\] must be a list of values"),
        ({"search": {"scan": []}}, ValueError, r"search\['scan'\] is empty"),
        ({"search": {"units": ["layers"]}}, ValueError, "units must be .*got 'layers'"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(given, error, message):
    with pytest.raises(error, match=message):
        tune(**{"step": lambda settings: None, "topology": "v3-8", **given})


class Block(nn.Module):
    def __init__(self, width=WIDTH, inner=INNER):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(self.first(x))


def small_loss(model, settings):
    return model(torch.zeros(settings.batch, WIDTH).to("xla")).float().square().mean()


def small_step():
    return training_step(Network, small_loss, compute_dtype=torch.bfloat16, clip_grad_norm=1.0)


@pytest.mark.slow
@without_ranks
def test_a_small_model_is_tuned_and_the_search_is_resumed(tmp_path):
    how = {"batch": ROWS, "budget": 2, "cache": tmp_path, "progress": False, "title": "small"}
    how["search"] = {"scan": [False]}
    found = tune(small_step(), "v3-8", **how)
    assert found.compilations == 2 and found.from_cache == 0
    tried = [trial for trial in found.trials if trial.tried]
    assert len(tried) == 2 and found.best is tried[0] and tried[0].measured.fits
    assert tried[0].measured.seconds <= tried[1].measured.seconds
    text = str(found)
    assert text.startswith("BEST: batch=512") and "2 of 2 compilations, 0 of them" in text
    heads = next(line for line in text.splitlines() if "step, ms" in line).split()
    assert set(heads) & {field.name for field in dataclasses.fields(ShardingSettings)}
    given = {"model": Network(1)}
    with mock.patch.object(ShardingSettings, "wrap", lambda self, model: self):
        exec(found.code, given)
    assert given["model"] == given["settings"] == found.settings and found.code.strip() in (
        "\n".join(line.removeprefix("    ") for line in text.splitlines())
    )
    assert json.loads(found.to_json())["settings"]["batch"] == ROWS
    with mock.patch.object(Target, "_run", side_effect=AssertionError("compiled again")):
        own = tune(small_step(), "v3-8", baseline=lambda: small_step()(found.settings), **how)
        assert own.settings is None and own.own.seconds == found.best.measured.seconds
        assert own.compilations == own.from_cache == 2
        assert str(own).startswith("BEST: your own step as it is")
        # With chips that compute ten times slower only the times differ.
        chip = resolve("v3-8").chip
        slow = Calibration("v3", matrix_flops=chip.flops / 10)
        slower = tune(small_step(), "v3-8", calibration=slow, **{**how, "budget": 1})
        before = next(one for one in tried if one.settings == slower.best.settings)
        assert slower.best.measured.compute > 5 * before.measured.compute


@without_ranks
def test_warnings_of_an_own_step_are_notes(tmp_path):
    """Without compiling: for the compiler no program fits."""
    compiled = CompiledStep("", hlo(EMPTY), b"", "", None, "out of memory", 1.0, False, 0.0)

    def step(settings):
        model = settings.wrap(Network())
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
        loss = small_loss(model, settings)
        for _ in range(2):
            loss.item()
        loss.backward()
        optimizer.step()

    how = {"batch": ROWS, "budget": 1, "cache": tmp_path, "progress": False, "search": PLAIN}
    own = {"baseline": lambda: step(ShardingSettings(batch=ROWS))}
    for more, whose in ((own, "your own step"), ({}, "the first compiled row")):
        with mock.patch.object(Target, "compile", lambda *given: compiled):
            read, untrained = tune(step, "v3-8", **how, **more).notes  # each once
        assert read.startswith(f"Warning of {whose}: a value is read on the host during the step")
        assert "1 of 11 parameters that the optimizer trains got no gradient" in untrained


@without_ranks
def test_a_model_without_blocks_is_one_unit_which_a_note_says(tmp_path):
    compiled = CompiledStep("", hlo(EMPTY), b"", "", None, "out of memory", 1.0, False, 0.0)

    def step(settings):
        layers = (nn.Sequential(nn.Linear(8, 8)) for _ in range(2))  # of no class of the user
        model = settings.wrap(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(ROWS, 8).to("xla")).mean().backward()
        optimizer.step()

    with mock.patch.object(Target, "compile", lambda *given: compiled):
        found = tune(step, "v3-8", batch=ROWS, budget=1, cache=tmp_path, progress=False)
    assert {trial.settings.units for trial in found.trials} == {"model"}
    assert found.notes[0].startswith("The model has no repeated blocks, so it is one unit. Name")
