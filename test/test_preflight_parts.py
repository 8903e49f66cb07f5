"""Parts of xla_fsdp.preflight by themselves: no API, and what one machine cannot bring about."""

import ast
import importlib.metadata
import itertools
import subprocess
import sys

import pytest
from preflight_command import CLEAN, ROOT, WHERE
from processes import ended

from xla_fsdp.preflight import workers
from xla_fsdp.preflight.__main__ import main
from xla_fsdp.preflight.checks import Status, by_worker, ok
from xla_fsdp.preflight.worker_checks import GIB, OLDEST_PYTHON, PINS, check_looks
from xla_fsdp.preflight.workers import Answer, _run_all


def look(**changes):
    stated = {
        "time": 1000.0,
        "variables": {"PJRT_DEVICE": None, "XLA_FLAGS": None},
        "chips": 4,
        "users": [],
        "foreign_lock": False,
        "memory": [100 * GIB, 90 * GIB],
        "cache_free": 50 * GIB,
    }
    return Answer(stated | changes, "", started=999.0, ended=1003.0)


def check(name, *answers):
    checks = {check.name: check for check in check_looks(dict(enumerate(answers)), None)}
    return checks[name].status, checks[name].found


@pytest.mark.parametrize(
    "name, changes, status, found",
    [
        ("clocks", {"time": 1007.9}, Status.OK, "within 5 s"),
        ("clocks", {"time": 1063.0}, Status.WARNING, "worker 1: 60 s or more ahead of"),
        ("clocks", {"time": 939.0}, Status.WARNING, "worker 1: 60 s or more behind"),
        ("memory", {"memory": [100 * GIB, 80 * GIB]}, Status.OK, "80 of 100 GiB"),
        ("memory", {"memory": [100 * GIB, 5 * GIB]}, Status.WARNING, "worker 1: 5 of 100 GiB"),
        ("memory", {"memory": None}, Status.WARNING, "not stated"),
        ("compilation cache", {"cache_free": GIB}, Status.WARNING, "worker 1: 1.0 GiB free"),
        ("chips free", {"foreign_lock": True}, Status.WARNING, "worker 1: /tmp/libtpu_lockfile"),
        ("chips", {"chips": 3}, Status.FAILED, "worker 0: 4 visible; worker 1: 3 visible"),
    ],
)
def test_a_worker_unlike_the_first(name, changes, status, found):
    assert check(name, look(), look())[0] is Status.OK
    got, text = check(name, look(), look(**changes))
    assert got is status and found in text


def test_no_chips_anywhere():
    assert check("chips", look(chips=0), look(chips=0))[0] is Status.FAILED


def test_another_device_everywhere():
    cpu = look(variables={"PJRT_DEVICE": "CPU"})
    assert check("environment", cpu, cpu) == (Status.WARNING, "workers 0-1: PJRT_DEVICE=CPU")


def test_equal_findings_are_told_once_and_not_too_many():
    assert by_worker({2: "b", 0: "a", 1: "a", 5: "a"}) == "workers 0-1, 5: a; worker 2: b"
    assert by_worker({n: str(n) for n in range(8)}).endswith("worker 5: 5; and 2 other findings")


def test_a_check_is_one_line_that_no_terminal_acts_upon():
    line = ok("workers", "a\nb\x1b[2Jc").line()
    assert line.isprintable() and line.endswith("a b [2Jc")


def test_a_command_without_end_is_stopped_and_its_words_are_kept_in_part(tmp_path):
    # "timeout" would end it, with code 124, if nobody else did.
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec timeout 300 yes"]
    for seconds in (0.5, 5, 50):  # a busy machine may not let it say that much in the first
        outcome = _run_all({0: command}, seconds, at_once=1)[0]
        assert outcome.code is None
        if len(outcome.out) == 1 << 20:
            break
    assert len(outcome.out) == 1 << 20
    assert ended((tmp_path / "pid").read_text())


def test_commands_run_beside_each_other_but_not_too_many(monkeypatch):
    # A clock that only orders what happens.
    monkeypatch.setattr(workers.time, "time", itertools.count().__next__)
    outcomes = _run_all({n: ["sleep", "0.1"] for n in range(4)}, seconds=300, at_once=2).values()
    assert {outcome.code for outcome in outcomes} == {0} and len(outcomes) == 4
    beside = [
        sum(other.started <= one.started < other.ended for other in outcomes) for one in outcomes
    ]
    assert max(beside) == 2


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--ckpt_dir=/x",), "leave out --skip_workers"),
        (("--tpu=a/b",), "'a/b' is not a valid name"),
        (("--tpu=grpc://10.0.0.1",), "is not a valid name"),
        (("--timeout=nan",), "--timeout"),
        (("--retries=-1",), "--retries"),
        (("--world_size=many",), "--world_size"),
        (("--discovery_url=http://[::1",), "--discovery_url 'http://[::1': Invalid IPv6 URL; give"),
        (("--discovery_url=ftp://x/y",), "--discovery_url 'ftp://x/y': it starts with neither"),
        (("--discovery_url=nourl",), "'nourl': it starts with neither http:// nor https://"),
        (("--discovery_url=http://",), "no host"),
        (("--discovery_url=http://a..b/",), "label empty or too long"),
        (("--discovery_url=http://x:abc/",), "--discovery_url 'http://x:abc/': Port"),
        (("--discovery_url=http://x:0/",), "port 0"),
        (("--discovery_url=http://x y/",), "spaces"),
        (("--discovery_url=http://me@x/",), "it contains a user name"),
        (("--api_endpoint=http://[::1",), "--api_endpoint 'http://[::1': Invalid IPv6 URL"),
        (("--api_endpoint=http://127.0.0.1:99999/",), "Port out of range 0-65535"),
    ],
)
def test_wrong_flags(flags, said, capsys):
    try:
        code = main(["--tpu=pod", *WHERE, "--skip_workers", *flags])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_url_in_the_environment_is_named(monkeypatch, capsys):
    monkeypatch.setenv("TPU_API_DISCOVERY_URL", "nourl")
    assert main(["--tpu=pod", *WHERE, "--skip_workers"]) == 2
    assert "$TPU_API_DISCOVERY_URL 'nourl': it starts with neither" in capsys.readouterr().err


def test_neither_torch_nor_the_client_is_imported_to_say_no():
    code = (
        "import sys; from xla_fsdp.preflight.__main__ import main; "
        "main(['--tpu', 'a/b', '--zone', 'z', '--project', 'p', '--skip_workers']); "
        "print([m for m in ('torch', 'torch_xla', 'cloud_tpu_client', 'absl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=CLEAN)
    assert done.stdout.strip() == "[]"


def test_pins_are_those_of_the_package():
    required = importlib.metadata.requires("xla_fsdp")
    assert {f"{name}=={version}" for name, version in PINS.items()} <= set(required)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    assert importlib.metadata.metadata("xla_fsdp")["Requires-Python"] == f">={oldest}"


def test_the_probe_is_for_old_pythons_too():
    text = (ROOT / "xla_fsdp" / "preflight" / "probe.py").read_text()
    ast.parse(text, feature_version=(3, 6))
