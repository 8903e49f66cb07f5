"""examples/pod/ray_train.py: what it asks Ray for, and that one host's end is every host's end."""

import os
import socket
import sys
from importlib import import_module
from pathlib import Path

import pytest
from processes import ended, run_command

POD = Path(__file__).resolve().parent.parent / "examples" / "pod"


@pytest.fixture
def ray_train(monkeypatch):
    monkeypatch.syspath_prepend(str(POD))
    return import_module("ray_train")


@pytest.fixture
def ray_host(ray_train):
    return import_module("ray_host")


class LocalHosts:
    """The hosts of a run as objects of this process, each with a real command."""

    def __init__(self, ray_host, commands):
        self._lost = ray_host.Polled(["gone"], ray_host.LOST)
        self.hosts = [
            ray_host.Host(command, {"POD_HOST": str(index)}, grace=1.0) if command else None
            for index, command in enumerate(commands)
        ]

    def poll(self, indices):
        return {i: self.hosts[i].poll(0.1) if self.hosts[i] else self._lost for i in indices}

    def stop(self, indices):
        for index in indices:
            self.hosts[index].stop()


@pytest.fixture
def watch(ray_train, ray_host):
    """``watch(*scripts)`` runs a shell script a host, None is a lost host: (code, lines)."""

    def run(*scripts):
        hosts = LocalHosts(ray_host, [script and ["bash", "-c", script] for script in scripts])
        lines = []
        try:
            return ray_train.watch(hosts, len(scripts), lines.append), lines
        finally:
            hosts.stop([i for i, host in enumerate(hosts.hosts) if host])

    return run


def test_output_of_every_host_and_success(watch):
    code, lines = watch("echo $POD_HOST says hello", "sleep 0.3; echo $POD_HOST says hello")
    assert (code, sorted(lines)) == (0, ["[host 0] 0 says hello", "[host 1] 1 says hello"])


def test_a_failing_host_ends_the_others_and_what_was_started(watch, tmp_path):
    pid = tmp_path / "pid"
    code, lines = watch(
        f"sleep 600 & echo $! > {pid}; wait",
        f"until [ -s {pid} ]; do sleep 0.1; done; sleep 600 & echo $!; exit 7",
    )
    assert code == 7
    left, *told = lines
    assert told == ["ray_train.py: host 1 exited with 7; stopping the others"]
    assert ended(pid.read_text()) and ended(left.removeprefix("[host 1] "))


def test_a_lost_host_ends_the_others(watch):
    code, lines = watch("sleep 600", None)
    assert code == 1
    assert lines == ["[host 1] gone", "ray_train.py: host 1 is lost; stopping the others"]
    assert watch("kill -KILL $$")[0] == 137  # a command killed by a signal has a code


def test_a_command_that_does_not_exist(ray_host):
    polled = ray_host.Host(["/no/such"], {}).poll()
    assert polled.code == 127
    assert polled.lines == ["cannot start /no/such: No such file or directory: /no/such"]


def test_chips_that_ray_hides_are_seen(ray_host, monkeypatch):
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    host = ray_host.Host(["bash", "-c", "echo [$TPU_VISIBLE_CHIPS]$PJRT_DEVICE"], {})
    lines, code = [], None
    while code is None:
        more, code = host.poll()
        lines += more
    assert lines == [f"[]{os.environ.get('PJRT_DEVICE', '')}"]


def test_a_killed_actor_takes_its_command_along():
    text = """
import os, signal
from ray_host import Host

host = Host(["bash", "-c", "echo $$; sleep 600"], {})
print(host.poll(300).lines[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert ended(run_command(sys.executable, "-c", text, cwd=POD, code=-9).stdout)


def script(*arguments, code=0):
    return run_command(sys.executable, POD / "ray_train.py", *arguments, code=code)


def test_dry_run_says_what_it_asks_ray_for():
    done = script("--slice=v4-32", "--env=A=b=c", "--cwd=/x", "--dry_run", "--", "python", "a b.py")
    actors, slice, host, *rest = done.stdout.splitlines()
    assert actors == "actors: 4, one a host (placement group, STRICT_SPREAD)"
    assert "first host has {'TPU-v4-32-head': 1}" in slice and "{'CPU': 1, 'TPU': 4, " in host
    assert rest[:2] == ["environment: A=b=c", "environment: PJRT_DEVICE=TPU"]
    assert rest[2:] == ["folder: /x", "command: python 'a b.py'"]
    done = script("--cpu_hosts=2", "--dry_run", "--", "true")
    assert "each host: {'CPU': 1}\nenvironment: PJRT_DEVICE=CPU\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --slice --cpu_hosts is required"),
        (["--slice=v4-32"], "no command given"),
        (["--slice=v4-33", "--", "x"], "--slice: topology 'v4-33'"),
        (["--slice=v4:2x2x4", "--", "x"], "--slice must be an accelerator type"),
        (["--cpu_hosts=0", "--", "x"], "--cpu_hosts must be at least 1"),
        (["--cpu_hosts=2", "--env=A", "--", "x"], "--env must be NAME=VALUE, got 'A'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, message):
    done = script(*arguments, code=2)
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr


def test_without_ray_it_says_what_to_install(ray_train, monkeypatch, capsys):
    monkeypatch.setattr(ray_train, "ray", None)  # as if it were not installed
    assert ray_train.main(["--cpu_hosts=2", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert said == "ray_train.py: Ray is not installed here; pip install 'ray>=2.9'\n"


@pytest.mark.slow
def test_an_address_where_nothing_is_ends_at_once():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        for scheme in ("", "ray://"):
            address = f"{scheme}127.0.0.1:{bound.getsockname()[1]}"
            done = script(f"--address={address}", "--cpu_hosts=2", "--", "true", code=2)
            said = f"ray_train.py: --address={address}: no Ray cluster can be reached there: "
            assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    done = script("--address=127.0.0.1:x", "--cpu_hosts=2", "--", "true", code=2)
    assert "must be HOST:PORT" in done.stderr


ON_RAY = """
import os, subprocess, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", TPU_NAME="slice-a")
os.environ["RAY_raylet_start_wait_time_s"] = "120"  # a loaded machine
from ray.cluster_utils import Cluster

# The resources that Ray gives the hosts of a v4-16 named slice-a.
head = {"num_cpus": 0, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
for extra in ({"TPU-v4-16-head": 1}, {}):
    cluster.add_node(num_cpus=1, resources={"TPU": 4, "slice-a": 1, **extra})
cluster.wait_for_nodes()
for script in ("echo $POD_HOST $PJRT_DEVICE", "[ $POD_HOST = 1 ] && exit 7; sleep 600"):
    command = [sys.executable, sys.argv[1], f"--address={cluster.address}", "--slice=v4-16"]
    command += ["--", "bash", "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1500)
    print(done.stdout, end="")
    print("exit code", done.returncode, flush=True)
cluster.shutdown()
"""


@pytest.mark.full
def test_on_a_real_ray_cluster(run_script):
    done = run_script(ON_RAY, POD / "ray_train.py", timeout=1500)
    lines = done.stdout.splitlines()
    assert {"[host 0] 0 TPU", "[host 1] 1 TPU"} <= set(lines), done.stderr
    assert "ray_train.py: host 1 exited with 7; stopping the others" in lines
    assert [line for line in lines if line.startswith("exit")] == ["exit code 0", "exit code 7"]
