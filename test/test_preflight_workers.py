"""python -m xla_fsdp.preflight with workers that are folders here; the probe really runs."""

import os
import signal
import sys
import time

import pytest
from preflight_command import finish, lines, start
from processes import ended
from tpu_api import TpuApi, node, write_credentials
from tpu_workers import Workers


@pytest.fixture(scope="module")
def api():
    api = TpuApi()
    yield api
    api.close()


@pytest.fixture(scope="module")
def key(api, tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "key.json"
    write_credentials(path, f"{api.url}token")
    return path


@pytest.fixture(scope="module", autouse=True)
def impatient(api, key, tmp_path_factory):
    """Workers and the command for each of the two tests in which it waits for half a minute. They
    wait while the other tests run."""
    api.answers = [node()]
    begun = []
    for pod in ({0: "dead", 2: "nonsense", 1: "hang"}, {2: "hang second"}):
        root = tmp_path_factory.mktemp("pod")
        workers = Workers(root)
        for number, how in pod.items():
            workers.behave(number, how)
        # A busy machine may take seconds to start the others' Pythons.
        flags = (*workers.flags(), "--timeout=30", "--ckpt_dir=~/mount")
        begun.append((workers, number, start(api, key, root, *flags)))
    for workers, number, command in begun:
        while command.poll() is None and not workers.sleeper(number):
            time.sleep(0.05)
    yield [(workers, command) for workers, _, command in begun]
    for workers, number, command in begun:
        if command.poll() is None:  # its test is not run
            command.kill()
            os.kill(workers.sleeper(number), signal.SIGKILL)
            finish(command)


@pytest.fixture
def workers(tmp_path):
    return Workers(tmp_path)


@pytest.fixture
def begin(api, key, workers, tmp_path):
    """``begin(*flags)``: the command, running."""
    api.answers = [node()]
    return lambda *flags: start(api, key, tmp_path, *workers.flags(), *flags)


@pytest.fixture
def preflight(begin):
    """``preflight(*flags)``: the finished command."""
    return lambda *flags: finish(begin(*flags))


def test_four_healthy_workers(preflight, workers):
    checks = lines(preflight("--ckpt_dir=~/mount/runs/vit"), 0)
    assert {status for status, _ in checks.values()} <= {"ok", "warning"}
    for name, text in (
        ("workers", "4 of 4 answered"),
        ("torch", "2.9.0 everywhere"),
        ("torch_xla", "2.9.0 everywhere"),
        ("libtpu", "0.0.21 everywhere"),
        ("xla_fsdp", "0.1.0 everywhere, as here"),
        ("chips", "4 on every worker"),
        ("chips free", "no process uses one, as far as this user can see"),
        ("environment", "none set, everywhere"),
        ("clocks", "within 5 s and the time of an answer"),
        ("checkpoints written", "~/mount/runs/vit: by 4 of 4 workers"),
        ("checkpoints shared", "~/mount/runs/vit: by 4 of 4 workers"),
    ):
        assert checks[name] == ("ok", text)
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


def test_other_versions_on_some_workers(preflight, workers):
    workers.install(3, "torch", "2.8.0")
    workers.install(1, "xla_fsdp", "0.0.9")
    checks = lines(preflight(), 1)
    assert checks["torch"][0] == "FAILED"
    assert "workers 0-2: 2.9.0; worker 3: 2.8.0 | expected: 2.9.0 every" in checks["torch"][1]
    assert checks["xla_fsdp"][0] == "FAILED"
    assert "workers 0, 2-3: 0.1.0; worker 1: 0.0.9" in checks["xla_fsdp"][1]
    assert checks["torch_xla"][0] == "ok"


def test_other_versions_everywhere(preflight, workers):
    for number in range(4):
        workers.install(number, "torch_xla", "2.8.1+libtpu")
        workers.install(number, "libtpu", "0.0.30")
        workers.install(number, "torch", "2.9.0+cpu")
    checks = lines(preflight(), 1)
    assert checks["torch_xla"][0] == "FAILED" and "torch_xla==2.9.0" in checks["torch_xla"][1]
    assert checks["libtpu"][0] == "warning" and "expected: 0.0.21" in checks["libtpu"][1]
    assert checks["torch"] == ("ok", "2.9.0+cpu everywhere")


def test_chips_and_environment_that_differ(preflight, workers):
    (workers.folder(2) / "dev" / "accel3").unlink()
    workers.behave(1, "LIBTPU_INIT_ARGS=--xla_x=1\nPJRT_DEVICE=TPU")
    with (workers.folder(0) / "dev" / "accel0").open():  # as a training run would
        checks = lines(preflight(), 1)
    assert checks["chips"][0] == "FAILED"
    assert "workers 0-1, 3: 4 visible; worker 2: 3 visible" in checks["chips"][1]
    assert checks["chips free"][0] == "FAILED"
    assert "worker 0: held by process" in checks["chips free"][1]
    assert checks["environment"][0] == "warning"
    assert "worker 1: PJRT_DEVICE=TPU LIBTPU_INIT_ARGS=--xla_x=1" in checks["environment"][1]


def test_interrupted(begin, workers):
    # All of them: it is past starting commands then, and waits.
    for number in range(4):
        workers.behave(number, "hang")
    began = begin("--timeout=600")
    while began.poll() is None and not all(map(workers.sleeper, range(4))):
        time.sleep(0.05)
    began.send_signal(signal.SIGINT)
    done = finish(began)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert all(ended(workers.sleeper(number)) for number in range(4))  # nothing goes on behind


def test_no_worker_answers(preflight, workers):
    for number in range(4):
        workers.behave(number, "dead")
    checks = lines(preflight("--ckpt_dir=~/mount"), 1)
    assert "workers 0-3: the command ended" in checks["workers"][1]
    assert "torch" not in checks


def test_an_interpreter_that_is_not_there(preflight):
    text = lines(preflight("--python=/no/python"), 1)["workers"][1]
    assert "workers 0-3: the command ended with 127" in text and "/no/python" in text


def test_a_path_that_one_worker_cannot_write(preflight, workers):
    (workers.folder(2) / "mount").unlink()
    (workers.folder(2) / "mount").touch()
    checks = lines(preflight("--ckpt_dir=~/mount/run"), 1)
    status, text = checks["checkpoints written"]
    assert status == "FAILED" and "worker 2: NotADirectoryError" in text
    assert checks["checkpoints shared"] == (
        "ok",
        "~/mount/run: by 3 of 4 workers",
    )
    assert list(workers.shared.iterdir()) == []


def test_a_path_that_is_not_shared(preflight, workers):
    own = workers.folder(3) / "mount"
    own.unlink()
    own.mkdir()
    checks = lines(preflight("--ckpt_dir=~/mount"), 1)
    status, text = checks["checkpoints shared"]
    assert status == "FAILED"
    assert "workers 0-2: no file of worker 3; worker 3: no file of workers 0-2" in text
    assert checks["checkpoints written"][0] == "ok"
    assert list(workers.shared.iterdir()) == list(own.iterdir()) == []


def test_urls_go_through_fsspec(preflight, workers):
    checks = lines(preflight(f"--ckpt_dir=file://{workers.shared}"), 0)
    assert checks["checkpoints shared"][0] == checks["checkpoints written"][0] == "ok"
    assert list(workers.shared.iterdir()) == []
    checks = lines(preflight("--ckpt_dir=memory://bucket/run"), 1)  # each worker has its own
    assert checks["checkpoints shared"][0] == "FAILED"
    checks = lines(preflight("--ckpt_dir=nosuch://bucket/run"), 1)
    assert "workers 0-3: ValueError: Protocol not known: nosuch" in checks["checkpoints written"][1]


def test_a_node_that_is_not_ready_has_no_workers_to_ask(preflight, api):
    api.answers = [node(state="STOPPED", health=None)]
    checks = lines(preflight(), 1)
    assert checks["workers"][0] == "skipped"


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
    script.write_text("import sys; print(*sys.argv[1:-1]); print(len(sys.argv[-1].split()))")
    fields = "{tpu} {zone} {project} {worker} {address} {external_address}"
    done = preflight(f"--worker_command={sys.executable} {script} {fields} {{command}}")
    assert lines(done, 1)["workers"][0] == "FAILED"
    # As gcloud ends: the reason, then what to do.
    script.write_text(
        "import sys; sys.exit('SSH...\\nERROR: ' + ' '.join(sys.argv[1:-1]) + '\\n\\nRun')"
    )
    checks = lines(preflight(f"--worker_command={sys.executable} {script} {fields} {{command}}"), 1)
    told = (
        "worker 3: the command ended with 1: ERROR: pod us-central2-b lab 3 10.0.0.3 192.0.2.3 Run"
    )
    assert told in checks["workers"][1]


def test_workers_that_do_not_answer(impatient):
    checks = lines(finish(impatient[0][1]), 1)
    status, text = checks["workers"]
    assert status == "FAILED"
    assert "worker 0: the command ended with 1: ssh: connect to host" in text
    assert "worker 1: no answer in 30 s" in text
    assert "worker 2: the answer is not from the probe: Welcome!" in text
    # What the fourth says is still looked at.
    assert checks["torch"][0] == "ok"
    assert checks["checkpoints written"] == ("ok", "~/mount: by 1 of 4 workers")
    assert checks["checkpoints shared"][0] == "skipped"


def test_a_mount_that_hangs(impatient):
    workers, command = impatient[1]
    checks = lines(finish(command), 1)
    assert checks["workers"][0] == "ok"
    assert "worker 2: no answer in 30 s" in checks["checkpoints written"][1]
    assert checks["checkpoints shared"][0] == "ok"
    assert checks["probe files"][0] == "warning"
    assert list(workers.shared.iterdir()) == []
