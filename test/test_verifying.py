"""``xla_fsdp.verify`` and ``preflight --measure``: what is measured, judged, told and kept."""

import contextlib
import dataclasses
import json
from time import time as now
from unittest import mock

import pytest
import torch
import torch_xla.backends
import torch_xla.core.xla_model as xm

import xla_fsdp
from xla_fsdp.extras import MissingExtraError
from xla_fsdp.pods import microbenchmarks, parity, stages, steps, verify
from xla_fsdp.pods.findings import Finding, Status
from xla_fsdp.pods.measurements import CollectiveTime, Job, Machine, Rate, StepRun, read_notes
from xla_fsdp.pods.microbenchmarks import axes, modelled
from xla_fsdp.pods.parity import CASES, _parity_finding
from xla_fsdp.pods.privacy import scrubbed, shown_environment
from xla_fsdp.pods.steps import Size
from xla_fsdp.pods.verification_report import Verification
from xla_fsdp.preflight import main
from xla_fsdp.tpu.calibration import Calibration, CalibrationError, calibrated, load_calibration
from xla_fsdp.tpu.chips import V5E
from xla_fsdp.tpu.topology import resolve

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
HOSTILE = '<script>alert("1")</script>'


def measured(slice, sizes=(1 << 13, 1 << 20, 1 << 26)):
    """What a slice would have measured whose links are as its chip says."""
    found = []
    for axis in axes(slice.devices, slice):
        for kind in KINDS:
            groups = axis.around if kind == "collective-permute" else axis.groups
            for size in sizes:
                time = CollectiveTime(kind, axis.name, groups, size, 0.0)
                found.append(dataclasses.replace(time, seconds=modelled(time, slice)))
    return found


@pytest.mark.parametrize("name", ["v5litepod-8", "v5litepod-64", "v4-32", "v3-32", "v5litepod-4"])
def test_the_figures_of_links_are_found_again(name):
    published = resolve(name)
    true = {"link_bandwidth": 37e9, "launch_latency": 9e-6, "hop_latency": 2e-6}
    slice = dataclasses.replace(published, chip=dataclasses.replace(published.chip, **true))
    found = verify.calibrate(published.chip.family, measured(slice), [], published)
    for figure, value in true.items():
        assert getattr(found, figure) == pytest.approx(value, rel=1e-6), figure
    again = calibrated(published, found)
    for time in measured(slice):
        if time.axis != "cores, 2":
            assert modelled(time, again) == pytest.approx(time.seconds, rel=1e-6)


def test_axes_of_a_slice_are_its_rings_and_lines():
    every, x, y = axes(8, resolve("v5e:2x4"))
    assert every.groups == (tuple(range(8)),)
    assert x.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert y.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert y.around[:4] == ((0, 2), (2, 4), (4, 6), (6, 0))


RATES = (
    Rate("HBM, read and written", "B", 1e9, 1e9 / 700e9, 819e9),
    Rate("matrix product, 8192, bfloat16", "FLOP", 2.0 * 8192**3, 2.0 * 8192**3 / 150e12, 197e12),
    Rate("host to device", "B", 1e8, 0.01),
    Rate("device to host", "B", 1e8, 0.02),
)


def test_a_calibration_is_kept_and_changes_the_chip(tmp_path):
    found = verify.calibrate("v5e", [], RATES, resolve("v5litepod-8"))
    assert found.link_bandwidth is None
    path = tmp_path / "c.json"
    dataclasses.replace(found, about={"device": "TPU v5 lite"}).save(path)
    read = Calibration.load(path)
    assert read.about == {"device": "TPU v5 lite"} and read.source == "c.json"
    assert dataclasses.replace(read, about={}, source="measured") == found
    chip = read.apply(V5E)
    assert chip.hbm_bandwidth == pytest.approx(700e9)
    # A product of 8192 x 8192, 88 % of the peak by the compiler's cycles, takes what it took.
    cycles = 2 * 8192**3 / (V5E.matrix_cycles * V5E.flops) * V5E.clock_hz
    assert cycles / chip.clock_hz == pytest.approx(2 * 8192**3 / 150e12)
    assert chip.link_bandwidth == V5E.link_bandwidth and chip.flops == V5E.flops
    assert chip.sources["clock_hz"] == "measured: c.json"
    assert "76% of the peak (88%)" in read.note(V5E)
    assert read.to_device == pytest.approx(1e10) and read.to_host == pytest.approx(5e9)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: data["calibration"].update(family="v9"), "family 'v9', known are v2"),
        (lambda data: data["calibration"].update(link_bandwidth=-1), "link_bandwidth is -1"),
        (lambda data: data["calibration"].update(hbm_bandwidth=True), "hbm_bandwidth is True"),
        (lambda data: data["calibration"].update(clock=1), "unexpected keyword argument 'clock'"),
        (lambda data: data.update(format="plan"), "some other JSON"),
        (lambda data: data["calibration"].update(about=[]), "is damaged ('list' object"),
    ],
)
def test_damaged_calibrations_are_refused(tmp_path, change, said):
    path = tmp_path / "c.json"
    Calibration("v5e", link_bandwidth=40e9).save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match="c.json") as caught:
        Calibration.load(path)
    assert said in str(caught.value)


def test_calibrations_of_others_and_unlikely_ones_are_refused():
    for calibration, message in (
        (Calibration("v5e"), "is of v5e; the plan is for v3"),
        (Calibration("cpu", matrix_flops=1e9), "says nothing of a TPU"),
        (Calibration("v3", hbm_bandwidth=90e6), "hbm_bandwidth is 9e.07, published is 9e.11"),
    ):
        with pytest.raises(CalibrationError, match=message):
            calibrated(resolve("v3-8"), calibration)
    with pytest.raises(TypeError, match="calibration must be a file's path"):
        load_calibration({"family": "v3"})


def test_wrong_weights_are_found():
    reference = {"losses": torch.tensor([2.0, 1.0]), "w": torch.ones(4)}
    close = {**reference, "w": torch.tensor([1.0, 1.0, 1.00005, 1.0])}
    assert _parity_finding(CASES[0], close, reference).status is Status.OK
    for wrong in (1.01, float("nan"), float("inf")):
        other = {**reference, "w": torch.tensor([1.0, 1.0, wrong, 1.0])}
        found = _parity_finding(CASES[0], other, reference)
        assert found.status is Status.FAILED and "(w)" in found.found
    missing = {"losses": reference["losses"]}
    assert _parity_finding(CASES[0], missing, reference).status is Status.FAILED


def test_verdicts():
    first = {"compiled": 5, "cached": 0, "losses": ["a"]}
    second = {"compiled": 0, "cached": 5, "losses": ["a"]}
    for starts, status in (
        ([first, second], Status.OK),
        ([first, {**second, "compiled": 1}], Status.DIFFERENT),
        ([first, {**second, "losses": ["b"]}], Status.FAILED),
    ):
        assert verify.judge_programs(starts).status is status
    died = {"way": "raises", "error": "rank 3 raised", "rank": 3, "seconds": 2.0}
    assert verify.judge_death(died, 4).status is Status.OK
    for wrong in ({"error": ""}, {"rank": 2}, {"seconds": 100.0}):
        assert verify.judge_death({**died, **wrong}, 4).status is Status.FAILED
    ours = StepRun("s", "xla_fsdp", 0.010, 0.001, (2.0, 1.0), 2**30, 0.012, 2**30)
    theirs = StepRun("s", "in-tree", 0.020, 0.001, (2.0, 1.0))
    found = {f.name: f.status for f in verify.judge_steps([ours, theirs], True)}
    assert found == {"step s": Status.OK, "plan of s": Status.OK, "HBM of s": Status.OK}
    wrong = dataclasses.replace(theirs, losses=(2.0, 1.5))
    assert next(verify.judge_steps([ours, wrong], True)).status is Status.FAILED
    slow = dataclasses.replace(ours, seconds=0.03)
    found = [f.status for f in verify.judge_steps([slow, theirs], True)]
    assert found[:2] == [Status.DIFFERENT, Status.DIFFERENT]
    found = {f.name: f.status for f in verify.judge_steps([slow], False)}
    assert found == {"plan of s": Status.SKIPPED}


def test_nothing_secret_is_told():
    environment = {
        "HOME": "/home/marlene",
        "USER": "marlene",
        "HF_TOKEN": "zzz-very-secret-1",
        "XLA_FLAGS": "--xla_dump_to=/home/marlene/x --y=zzz-very-secret-1",
        "AWS_SECRET_ACCESS_KEY": "shhhhhhh",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1",
    }
    assert shown_environment(environment) == {"XLA_FLAGS": "--xla_dump_to=~/x --y=***"}
    for text, left in (
        ("gs://user:pw@bucket/x", "gs://***bucket/x"),
        ("Authorization: Bearer ya29.abcdefghijk", "Authorization: ***"),
        ("password = hunter2, then", "password = ***, then"),
        ("no file /home/marlene/run of marlene", "no file ~/run of USER"),
        ("key hf_abcdefghijklm here", "key *** here"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n", "***"),
    ):
        assert scrubbed(text, environment) == left


def test_a_report_is_told_kept_and_drawn(tmp_path):
    slice = resolve("v5litepod-8")
    times = [dataclasses.replace(t, modelled=1.02 * t.seconds) for t in measured(slice)]
    steps = (
        StepRun("4 x 64", "xla_fsdp", 0.01, 0.001, (2.0,), 2**30, 0.012, 2**30),
        StepRun("4 x 64", "in-tree", 0.02, 0.001, (2.0,)),
    )
    findings = (
        Finding(Status.FAILED, "parity", HOSTILE, "equal", "report it"),
        *verify.judge_collectives(times),
    )
    where = Machine("TPU v5 lite", "v5e", 8, "v5e:2x4", {"torch": "2.9.0"}, {"XLA_FLAGS": HOSTILE})
    calibration = verify.calibrate("v5e", times, RATES, slice)
    found = Verification(where, findings, RATES, tuple(times), steps, calibration)
    assert not found.ok and found.failures() == ["parity"]
    text = str(found)
    assert text.startswith("FAILED: 12 ok, 1 FAILED")
    assert "all-reduce, y, 4" in text and "150.00 TFLOP/s" in text
    found.save(tmp_path / "v.json")
    data = json.loads((tmp_path / "v.json").read_text())
    assert data["findings"][0]["status"] == "FAILED" and len(data["collectives"]) == len(times)
    assert data["calibration"]["link_bandwidth"] == pytest.approx(45e9)
    found.plot(tmp_path / "v.html")
    page = (tmp_path / "v.html").read_text()
    assert HOSTILE not in page and "<td>equal</td><td>report it</td>" in page
    assert "all-reduce, y, 4" in page and "150.00 TFLOP/s" in page
    assert "http:" not in page and "https:" not in page
    dataclasses.replace(found, findings=()).plot(tmp_path / "v.html")  # no stage that judges
    with pytest.raises(ValueError, match="allowed is .html"):
        found.plot(tmp_path / "v.png")


SCRIPT = """
import sys
from xla_fsdp.preflight import main

if __name__ == "__main__":
    sys.exit(main(["--measure", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_stages_of_two_cpu_ranks(run_script, tmp_path):
    flags = [f"--report={tmp_path}/v.json", f"--calibration={tmp_path}/c.json"]
    flags += ["--num_devices=2", "--sizes", "2 x 64", "--topology=v5litepod-4"]
    flags += ["--stages", *(name for name in stages.STAGES if name != "parity")]
    done = run_script(SCRIPT, *flags, env={"MY_TOKEN": "do-not-tell-this"}, timeout=600, code=0)
    text = (tmp_path / "v.json").read_text()
    assert "do-not-tell-this" not in text
    data = json.loads(text)
    assert data["where"]["family"] == "cpu" and data["where"]["ranks"] == 2
    statuses = {found["name"]: found["status"] for found in data["findings"]}
    names = ["compiled programs", "checkpoints", "a rank that raises"]
    expected = dict.fromkeys(names, "ok") | {"plan of 2 x 64": "skipped"}
    step = statuses.pop("step 2 x 64")  # slower than in-tree it may be, for once
    assert step in ("ok", "different") and statuses == expected, data["findings"]
    # The step was run, and planned by the real compiler, for another kind of device.
    ours, theirs = data["steps"]
    assert (ours["lane"], theirs["lane"]) == ("xla_fsdp", "in-tree")
    assert len(ours["losses"]) == 3 and ours["losses"] == pytest.approx(theirs["losses"], rel=2e-2)
    assert 0 < ours["planned"] < 0.01 < ours["seconds"] and 0 < ours["host"] < ours["seconds"]
    assert 1 << 20 < ours["planned_hbm"] < 1 << 28 and ours["hbm"] is None
    assert theirs["planned"] is None and data["planned_for"] == "v5litepod-4"
    assert "on CPU ranks, " in done.stdout and "in a plan for another device" in done.stdout
    kinds = {(time["kind"], time["bytes"]) for time in data["collectives"]}
    assert kinds == {(kind, size) for kind in KINDS for size in (1 << 13, 1 << 17)}
    assert all(time["seconds"] > 0 for time in data["collectives"])
    with pytest.raises(CalibrationError, match="says nothing of a TPU"):
        Calibration.load(tmp_path / "c.json").apply(V5E)


SMALL = Size(blocks=1, width=16, vocabulary=11, sequence=4, batch=1)


ON_TPU = (
    (stages, "_device_kind", lambda: "TPU v5 lite"),
    (stages, "_slice", lambda: resolve("v5litepod-4")),
    (stages, "SIZE", SMALL),
    (steps, "ON_TPU", {"small": SMALL}),
    (steps, "_peak", lambda: 3 << 20),
)
ON_CPU = (
    (microbenchmarks, "SIZES_ON_CPU", (1 << 10,)),
    (parity, "SIZE", Size(blocks=2, width=16, vocabulary=11, sequence=4, batch=2)),
)


def run_stages(rank, job, on_tpu):
    """The stages as a TPU has them, or as a CPU has them, on these devices."""
    changes = ON_TPU if on_tpu else ON_CPU
    with contextlib.ExitStack() as patches:
        if rank == 0:  # of the process, whose threads ranks are
            for module, name, value in changes:
                patches.enter_context(mock.patch.object(module, name, value))
        xm.rendezvous("changed")
        stages.run_stages(rank, job)
        xm.rendezvous("run")
        if rank == 0:  # parity computes matmuls in full precision
            torch_xla.backends.set_mat_mul_precision("default")


def on_two_ranks(run_ranks, folder, *names, on_tpu=False, **more):
    job = Job(names, "", "", now() + 1e6, str(folder / "00.notes"), **more)
    run_ranks(run_stages, 2, job, on_tpu)


def test_each_collective_is_measured(run_ranks, tmp_path):
    on_two_ranks(run_ranks, tmp_path, "collectives")
    times = read_notes(tmp_path, "collective")
    assert [(time.kind, time.bytes) for time in times] == [(kind, 1 << 10) for kind in KINDS]
    assert all(time.seconds > 0 and time.axis == "all" for time in times)


@pytest.mark.slow
def test_each_way_to_shard_trains_like_one_process(run_ranks, tmp_path):
    on_two_ranks(run_ranks, tmp_path, "parity")
    found = {each.name: each.status for each in read_notes(tmp_path, "finding")}
    assert found == {f"parity: {case.name}": Status.OK for case in CASES}


@pytest.mark.slow
def test_the_steps_of_a_tpu_are_judged_beside_their_plans(run_ranks, tmp_path, monkeypatch):
    stages_here = ("programs", "steps")  # first the peaks of memory, then the steps
    on_two_ranks(run_ranks, tmp_path, *stages_here, on_tpu=True, sizes=("small",))
    children = verify.Children(tmp_path, now() + 100, lambda text: None)
    where = verify.describe_machine(read_notes(tmp_path, "where"))
    assert (where.family, where.ranks, where.topology) == ("v5e", 2, "v5litepod-4")
    # What is planned, and where: of the slice that is here, the sizes of its kind.
    asked = []

    def planned(what, job, shown, more=None):
        asked.append((what, job.sizes, job.topology, more))
        Job((), "", "", 0.0, str(tmp_path / "00.notes")).add("plan", ("small", 0.01, 1 << 30))

    monkeypatch.setattr(children, "_run", planned)
    children.plan(Job(("steps",), "", "", 0.0), where, None)
    assert asked == [("plan", tuple(steps.ON_TPU), "v5litepod-4", {"PJRT_DEVICE": "CPU"})]
    found = verify.judge(tmp_path, children.failures, where, None, stages_here)
    ours = next(run for run in found.steps if run.lane == "xla_fsdp")
    assert (ours.planned, ours.hbm) == (0.01, 3 << 20) and ours.seconds > 0
    about = {each.name: each for each in found.findings}
    assert {"step small", "plan of small", "HBM of small"} < set(about) and found.ok
    assert about["compiled programs"].found == "1 of 2 starts trained"
    assert " x of the plan" in about["plan of small"].found
    assert about["HBM of small"].status is Status.DIFFERENT  # 3 MiB of one GiB
    assert "HBM of small" in str(found)


def test_sizes_of_another_device_are_told_of(run_ranks, tmp_path):
    on_two_ranks(run_ranks, tmp_path, "steps", sizes=("4 x 1024",))  # ran nothing, silently
    (found,) = read_notes(tmp_path, "finding")
    assert found.found == "4 x 1024 runs on another kind of device; here: 2 x 64, 3 x 64, 2 x 128"


def test_a_step_that_cannot_be_planned_is_told_of(tmp_path, monkeypatch):
    refuse = mock.Mock(side_effect=MissingExtraError("plan needs jax"))
    monkeypatch.setattr("xla_fsdp.planning.api.plan", refuse)
    notes = str(tmp_path / "00.notes")
    stages.plan_steps(Job((), "", "", 0.0, notes, sizes=("2 x 64",), topology="v5litepod-4"))
    (found,) = read_notes(tmp_path, "finding")
    assert (found.name, found.found) == ("plan of 2 x 64", "MissingExtraError: plan needs jax")


def test_a_stage_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    left = []

    def run(what, job, shown, more=None):
        left.append(job.stages)
        job = dataclasses.replace(job, notes=str(tmp_path / f"{len(left):02}.notes"))
        for stage in job.stages:
            if stage == "rates":
                return "ended with 1: RuntimeError: no"
            job.add("done", stage)

    children = verify.Children(tmp_path, now() + 100, lambda text: None)
    monkeypatch.setattr(children, "_run", run)
    children.run_stages(Job(("parity", "rates", "steps"), "", "", 0.0))
    assert left == [("parity", "rates", "steps"), ("steps",)]
    (found,) = children.failures
    assert (found.status, found.name) == (Status.FAILED, "rates") and "RuntimeError" in found.found
    assert found.remedy.startswith("the message is from the rank that failed")


def test_a_stage_without_enough_time_is_reported_with_what_helps(tmp_path, monkeypatch):
    late = "was still running at the time limit; its last message: compiling"
    children = verify.Children(tmp_path, now(), lambda text: None)
    monkeypatch.setattr(children, "_run", lambda *given: late)
    children.run_stages(Job(("parity", "rates"), "", "", 0.0))
    (found,) = children.failures
    assert (found.name, found.found) == ("parity", late)
    assert found.remedy == "allow more --seconds; if the stage does not end then, report it"


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--seconds=1", "seconds must be at least 30, got 1"),
        ("--num_devices=0", "num_devices must be a number of ranks from 1 on, got 0"),
        ("--num_devices=99", "num_devices must be an int from 1 to 8 on CPU, got 99"),
        ("--report=x.png", "must end in .json or .html"),
        ("--topology=v9-8", "'v9-8': there is no TPU family"),
        ("--report=none/x.html", "make the folder none first"),
        ("--calibration=/tmp", "cannot write /tmp: it is a folder; name a file in it"),
    ],
)
def test_wrong_arguments_fail_before_the_measurement(capsys, monkeypatch, flag, said):
    monkeypatch.setattr(verify.Children, "run_stages", None)
    assert main(["--measure", flag]) == 2
    assert said in capsys.readouterr().err


def test_stages_are_chosen(monkeypatch):
    ran = []
    monkeypatch.setattr("xla_fsdp.xlac.runtime_has_started", lambda: False)  # by another test
    monkeypatch.setattr(verify.Children, "run_stages", lambda self, job: ran.append(job.stages))
    main(["--measure", "--stages", "checkpoints", "rates"])
    assert ran == [("checkpoints", "rates")]
    for name in ("stages", "cases", "sizes"):
        with pytest.raises(ValueError, match=f"{name} has unknown names, .'other'.; allowed"):
            xla_fsdp.verify(**{name: ["other"]})
