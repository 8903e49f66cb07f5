"""python -m xla_fsdp.preflight with workers that are folders here; the probe really runs."""

import ast
import importlib.metadata
import itertools
import os
import signal
import sys

import pytest
import tpu_api
from conftest import ROOT
from processes import ended, run_command
from tpu_api import TpuApi, call, finish, lines, node, start, wait_until, write_credentials

from xla_fsdp.pods import commands
from xla_fsdp.pods.commands import run_all
from xla_fsdp.pods.findings import Status, by_worker, ok
from xla_fsdp.pods.worker_checks import GIB, OLDEST_PYTHON, PINS, check_looks
from xla_fsdp.pods.workers import WorkerAnswer

PACKAGES = {"torch": "2.9.0", "torch_xla": "2.9.0", "libtpu": "0.0.21", "xla_fsdp": "0.1.0"}

# What ssh is to a real pod: runs a command line as one of the workers.
_SSH = """
import os, subprocess, sys
folder, command = os.path.join({root!r}, sys.argv[1]), sys.argv[2]
with open(os.path.join(folder, "behaviour")) as file:
    behaviour = file.read()
if behaviour == "dead":
    sys.exit("ssh: connect to host 10.0.0.1 port 22: No route to host")
if behaviour == "nonsense":
    print("{{\\"token\\": 1}}\\nWelcome!")
    sys.exit(0)
def sleep():
    process = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(folder, "sleeper"), "w") as file:
        file.write(f"{{process.pid}}\\n")
    return process
if behaviour == "hang second":
    with open(os.path.join(folder, "behaviour"), "w") as file:
        file.write("hang")
if behaviour == "hang":
    sleep().wait()
if behaviour == "noisy":
    print("Warning: added to known hosts\\n{{", flush=True)
    # Outlives the command and keeps its output open, as a shared connection of ssh does.
    sleep()
environment = dict(os.environ, HOME=folder, PYTHONPATH=os.path.join(folder, "site"))
for line in behaviour.splitlines():
    if "=" in line:
        environment.update([line.split("=", 1)])
sys.exit(subprocess.run(["sh", "-c", command], env=environment, cwd=folder).returncode)
"""


class Workers:
    """Four healthy workers with four chips each, folders that are HOME of what runs there;
    ``shared`` is mounted at ~/mount."""

    def __init__(self, root):
        self.root, self.shared = root, root / "shared"
        self.shared.mkdir(parents=True)
        (root / "ssh.py").write_text(_SSH.format(root=str(root)))
        for number in range(4):
            folder = self.folder(number)
            (folder / "dev").mkdir(parents=True)
            (folder / "mount").symlink_to(self.shared)
            for chip in range(4):
                (folder / "dev" / f"accel{chip}").touch()
            for name, version in PACKAGES.items():
                self.install(number, name, version)
            self.behave(number, "")

    def folder(self, number):
        return self.root / str(number)

    def behave(self, number, how):
        """``dead``, ``nonsense``, ``hang``, ``hang second`` (when asked again), ``noisy``, or
        NAME=VALUE lines for the environment."""
        (self.folder(number) / "behaviour").write_text(how)

    def sleeper(self, number):
        """The process that a worker which hangs, or is noisy, has started; 0 if it has not."""
        path = self.folder(number) / "sleeper"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.endswith("\n") else 0

    def install(self, number, name, version):
        """Metadata that is found before what is really installed."""
        folder = self.folder(number) / "site" / f"{name}-{version}.dist-info"
        for old in folder.parent.glob(f"{name}-*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        folder.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        if name == "torch_xla":
            lines.append('Requires-Dist: libtpu==0.0.21; extra == "tpu"')
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    def flags(self):
        return [
            # -S: without the packages of this environment Python starts in less time.
            f"--worker_command={sys.executable} -IS {self.root}/ssh.py {{worker}} {{command}}",
            f"--python={sys.executable} -S",
            "--chip_files=~/dev/accel*",
            "--cache_dir=~/cache",
        ]


@pytest.fixture(scope="module")
def api():
    with TpuApi() as api:
        yield api


@pytest.fixture(scope="module")
def key(api, tmp_path_factory):
    return write_credentials(tmp_path_factory.mktemp("key") / "key.json", f"{api.url}token")


@pytest.fixture
def workers(tmp_path):
    return Workers(tmp_path)


@pytest.fixture
def preflight(api, key, workers, tmp_path, monkeypatch, capsys):
    """``preflight(*flags)``: the finished command."""
    api.answers = [node()]
    return lambda *flags: call(monkeypatch, capsys, api, key, tmp_path, *workers.flags(), *flags)


def test_four_healthy_workers(preflight, workers):
    checks = lines(preflight("--ckpt_dir=~/mount/runs/vit"), 0)
    assert {status for status, _ in checks.values()} <= {"ok", "warning"}
    expected = {
        "workers": "4 of 4 answered",
        "torch": "2.9.0 everywhere",
        "torch_xla": "2.9.0 everywhere",
        "libtpu": "0.0.21 everywhere",
        "xla_fsdp": "0.1.0 everywhere, as here",
        "chips": "4 on every worker",
        "chips free": "no process uses one, as far as this user can see",
        "environment": "none set, everywhere",
        "clocks": "within 5 s and the time of an answer",
        "checkpoints written": "~/mount/runs/vit: by 4 of 4 workers",
        "checkpoints shared": "~/mount/runs/vit: by 4 of 4 workers",
    }
    assert checks.items() >= {name: ("ok", text) for name, text in expected.items()}.items()
    assert {"python", "memory", "compilation cache", "checkpoint space"} <= set(checks)
    assert list(workers.shared.iterdir()) == []  # nothing is left, not even the folders


def test_a_login_that_says_more_and_keeps_its_output_open(preflight, workers):
    workers.behave(1, "noisy")
    try:
        assert lines(preflight(), 0)["workers"] == ("ok", "4 of 4 answered")
        assert not ended(workers.sleeper(1), within=0.0), "it was waited for"
    finally:
        if asleep := workers.sleeper(1):
            os.kill(asleep, signal.SIGKILL)


def test_workers_that_differ(preflight, workers):
    workers.install(3, "torch", "2.8.0")
    workers.install(1, "xla_fsdp", "0.0.9")
    (workers.folder(2) / "dev" / "accel3").unlink()
    workers.behave(1, "LIBTPU_INIT_ARGS=--xla_x=1\nPJRT_DEVICE=TPU")
    with (workers.folder(0) / "dev" / "accel0").open():  # as a training run would
        checks = lines(preflight(), 1)
    for name, status, part in (
        ("torch", "FAILED", "workers 0-2: 2.9.0; worker 3: 2.8.0 | expected: 2.9.0 every"),
        ("xla_fsdp", "FAILED", "workers 0, 2-3: 0.1.0; worker 1: 0.0.9"),
        ("chips", "FAILED", "workers 0-1, 3: 4 visible; worker 2: 3 visible"),
        ("chips free", "FAILED", "worker 0: held by process"),
        ("environment", "warning", "worker 1: PJRT_DEVICE=TPU LIBTPU_INIT_ARGS=--xla_x=1"),
        ("torch_xla", "ok", ""),
    ):
        assert checks[name][0] == status and part in checks[name][1], name


def test_other_versions_everywhere(preflight, workers):
    for number in range(4):
        workers.install(number, "torch_xla", "2.8.1+libtpu")
        workers.install(number, "libtpu", "0.0.30")
        workers.install(number, "torch", "2.9.0+cpu")
    checks = lines(preflight(), 1)
    assert checks["torch_xla"][0] == "FAILED" and "torch_xla==2.9.0" in checks["torch_xla"][1]
    assert checks["libtpu"][0] == "warning" and "expected: 0.0.21" in checks["libtpu"][1]
    assert checks["torch"] == ("ok", "2.9.0+cpu everywhere")


def test_tpu7x_needs_a_later_libtpu_than_torch_xla_requires(api, preflight, workers):
    api.answers = [node(acceleratorType="tpu7x-32")]
    reason = "0.0.51, because 0.0.21 does not support tpu7x"
    for libtpu, status, part in (
        ("0.0.21", "FAILED", f"expected: {reason} | remedy: pip install 'libtpu==0.0.51'"),
        ("0.0.51", "ok", "0.0.51 everywhere"),
    ):
        for number in range(4):
            workers.install(number, "libtpu", libtpu)
        checks = lines(preflight(), 1 if status == "FAILED" else 0)
        assert checks["libtpu"][0] == status and part in checks["libtpu"][1]


def test_interrupted(api, key, workers, tmp_path):
    api.answers = [node()]
    # All of them: it is past starting commands then, and waits.
    for number in range(4):
        workers.behave(number, "hang")
    began = start(api, key, tmp_path, *workers.flags(), "--timeout=600")
    wait_until(lambda: all(map(workers.sleeper, range(4))), began)
    began.send_signal(signal.SIGINT)
    done = finish(began)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert all(ended(workers.sleeper(number)) for number in range(4))  # nothing goes on behind


def test_no_worker_answers(preflight, api):
    checks = lines(preflight("--python=/no/python", "--ckpt_dir=~/mount"), 1)
    text = checks["workers"][1]
    assert "workers 0-3: the command ended with 127" in text and "/no/python" in text
    assert "torch" not in checks
    api.answers = [node(state="STOPPED", health=None)]
    assert lines(preflight(), 1)["workers"][0] == "skipped"


def test_a_path_that_one_worker_cannot_write(preflight, workers):
    (workers.folder(2) / "mount").unlink()
    (workers.folder(2) / "mount").touch()
    checks = lines(preflight("--ckpt_dir=~/mount/run"), 1)
    status, text = checks["checkpoints written"]
    assert status == "FAILED" and "worker 2: NotADirectoryError" in text
    assert checks["checkpoints shared"] == ("ok", "~/mount/run: by 3 of 4 workers")
    assert list(workers.shared.iterdir()) == []


@pytest.mark.slow
def test_a_path_that_is_not_shared(preflight, workers):
    own = workers.folder(3) / "mount"
    own.unlink()
    own.mkdir()
    checks = lines(preflight("--ckpt_dir=~/mount"), 1)
    status, text = checks["checkpoints shared"]
    told = "workers 0-2: no file of worker 3; worker 3: no file of workers 0-2"
    assert status == "FAILED" and told in text
    assert checks["checkpoints written"][0] == "ok"
    assert list(workers.shared.iterdir()) == list(own.iterdir()) == []


@pytest.mark.full
def test_urls_go_through_fsspec(preflight, workers):
    fsspec = f"--python={sys.executable}"  # with the packages of this environment
    checks = lines(preflight(fsspec, f"--ckpt_dir=file://{workers.shared}"), 0)
    assert checks["checkpoints shared"][0] == checks["checkpoints written"][0] == "ok"
    assert list(workers.shared.iterdir()) == []
    checks = lines(preflight(fsspec, "--ckpt_dir=memory://bucket/run"), 1)
    assert checks["checkpoints shared"][0] == "FAILED"
    checks = lines(preflight(fsspec, "--ckpt_dir=nosuch://bucket/run"), 1)
    assert "workers 0-3: ValueError: Protocol not known: nosuch" in checks["checkpoints written"][1]


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--worker_command=ssh {address}", "must contain {command}"),
        ("--worker_command=sh {host} {command}", "allowed are {tpu}"),
        ("--worker_command=sh 'x {command}", "No closing quotation"),
        ("--worker_command=/no/ssh {command}", "there is no command /no/ssh"),
        ("--worker_command=sh -c {command}", "the same for all 4 workers"),
        ("--ckpt_dir=runs", "must be an absolute path"),
    ],
)
def test_wrong_ways_to_the_workers(preflight, flag, said):
    done = preflight(flag)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_what_is_filled_in(preflight, workers, tmp_path):
    script = tmp_path / "show.py"
    fields = "{tpu} {zone} {project} {worker} {address} {external_address}"
    command = f"--worker_command={sys.executable} {script} {fields} {{command}}"
    # As gcloud ends: the reason, then what to do.
    ends = "'SSH...\\nERROR: ' + ' '.join(sys.argv[1:-1]) + '\\n\\nRun'"
    script.write_text(f"import sys; sys.exit({ends})")
    checks = lines(preflight(command), 1)
    told = "the command ended with 1: ERROR: pod us-central2-b lab 3 10.0.0.3 192.0.2.3 Run"
    assert f"worker 3: {told}" in checks["workers"][1]


@pytest.mark.slow
def test_workers_that_do_not_answer(preflight, workers):
    for number, how in {0: "dead", 1: "hang second", 2: "nonsense"}.items():
        workers.behave(number, how)
    # A busy machine may take seconds to start the others' Pythons.
    checks = lines(preflight("--timeout=20", "--ckpt_dir=~/mount"), 1)
    status, text = checks["workers"]
    assert status == "FAILED"
    assert "worker 0: the command ended with 1: ssh: connect to host" in text
    assert "worker 2: the answer is not from the probe: Welcome!" in text
    assert checks["torch"][0] == "ok"
    assert "worker 1: no answer in 20 s" in checks["checkpoints written"][1]
    assert checks["checkpoints shared"][0] == "skipped"
    assert checks["probe files"][0] == "warning"
    assert list(workers.shared.iterdir()) == []


def look(**changes):
    stated = {
        "time": 1000.0, "variables": {"PJRT_DEVICE": None, "XLA_FLAGS": None}, "chips": 4,
        "users": [], "foreign_lock": False, "memory": [100 * GIB, 90 * GIB],
        "cache_free": 50 * GIB,
    }  # fmt: skip
    return WorkerAnswer(stated | changes, "", started=999.0, ended=1003.0)


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
    ],
)
def test_a_worker_unlike_the_first(name, changes, status, found):
    assert check(name, look(), look())[0] is Status.OK
    got, text = check(name, look(), look(**changes))
    assert got is status and found in text


def test_findings_of_several_workers_are_one_line_that_no_terminal_acts_upon():
    cpu = look(variables={"PJRT_DEVICE": "CPU"})
    assert check("environment", cpu, cpu) == (Status.WARNING, "workers 0-1: PJRT_DEVICE=CPU")
    assert check("chips", look(chips=0), look(chips=0))[0] is Status.FAILED
    # Equal ones are one, and there are not too many.
    assert by_worker({2: "b", 0: "a", 1: "a", 5: "a"}) == "workers 0-1, 5: a; worker 2: b"
    assert by_worker({n: str(n) for n in range(8)}).endswith("worker 5: 5; and 2 other findings")
    line = ok("workers", "a\nb\x1b[2Jc").line()
    assert line.isprintable() and line.endswith("a b [2Jc")


def test_a_command_without_end_is_stopped_and_its_words_are_kept_in_part(tmp_path):
    # "timeout" would end it, with code 124, if nobody else did.
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec timeout 300 yes"]
    for seconds in (0.5, 5, 50):  # a busy machine may not let it say that much in the first
        outcome = run_all({0: command}, seconds, at_once=1)[0]
        assert outcome.code is None
        if len(outcome.out) == 1 << 20:
            break
    assert len(outcome.out) == 1 << 20
    assert ended((tmp_path / "pid").read_text())


def test_commands_run_beside_each_other_but_not_too_many(monkeypatch):
    # A clock that only orders what happens.
    monkeypatch.setattr(commands.time, "time", itertools.count().__next__)
    outcomes = run_all({n: ["sleep", "0.1"] for n in range(4)}, seconds=300, at_once=2).values()
    assert {outcome.code for outcome in outcomes} == {0} and len(outcomes) == 4
    starts = [outcome.started for outcome in outcomes]
    assert max(sum(one.started <= at < one.ended for one in outcomes) for at in starts) == 2


PREFLIGHT = """
from xla_fsdp.preflight import main
main(["--tpu", "a/b", "--zone", "z", "--project", "p", "--skip_workers"])
"""


@pytest.mark.parametrize(
    "code, unneeded",
    [
        (PREFLIGHT, {"cloud_tpu_client", "absl"}),
        ("from xla_fsdp.plan_compiler import find_compiler\nfind_compiler()", {"numpy"}),
        ("from xla_fsdp.planning.reporting import report, page", {"matplotlib"}),
    ],
    ids=["a refusal of preflight", "finding a compiler", "reports"],
)
def test_nothing_large_is_imported(code, unneeded):
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | tpu_api.CLEAN
    words = (sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)")
    loaded = set(run_command(*words, env=env, code=None).stdout.split())
    assert "xla_fsdp" in loaded and not loaded & {"torch", "torch_xla", "jax", *unneeded}


def test_pins_are_those_of_the_package():
    required = importlib.metadata.requires("xla_fsdp")
    assert {f"{name}=={version}" for name, version in PINS.items()} <= set(required)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    assert importlib.metadata.metadata("xla_fsdp")["Requires-Python"] == f">={oldest}"


def test_the_probe_is_for_old_pythons_too():
    text = (ROOT / "xla_fsdp" / "pods" / "probe.py").read_text()
    ast.parse(text, feature_version=(3, 6))
