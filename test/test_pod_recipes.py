"""examples/pod: the JobSet against its schema, the commands of the recipes, and the shell scripts
with simulated workers and a simulated gcloud."""

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import ROOT
from processes import ended, free_port, run_command, shell_script

from xla_fsdp.ranks.slices import EXPECTED
from xla_fsdp.tpu.topology import resolve

POD = ROOT / "examples" / "pod"
README = (POD / "README.md").read_text()
JOBSET = yaml.safe_load((POD / "jobset.yaml").read_text())
RECIPES = sorted(path for path in POD.iterdir() if path.is_file())

# What GKE calls generations: the accelerator labels that xpk 0.6.0 has
# (src/xpk/core/system_characteristics.py).
GENERATIONS = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
}


SCHEMA = json.loads((ROOT / "test/data/jobset_schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD_SPEC = JOB["template"]["spec"]
(CONTAINER,) = POD_SPEC["containers"]


class TestJobSet:
    def test_one_pod_for_each_host_of_the_slice(self):
        selector = POD_SPEC["nodeSelector"]
        shape = selector["cloud.google.com/gke-tpu-topology"]
        family = GENERATIONS[selector["cloud.google.com/gke-tpu-accelerator"]]
        slice = resolve(f"{family}:{shape}")
        resources = CONTAINER["resources"]
        chips = resources["limits"]["google.com/tpu"]
        assert resources["requests"] == resources["limits"] == {"google.com/tpu": chips}
        assert chips == prod(slice.chips_per_host)
        assert JOB["parallelism"] == JOB["completions"] == slice.hosts
        assert JOB["completions"] * chips == prod(map(int, shape.split("x")))
        assert slice.shape == resolve("v6e-64").shape  # as the file's first line and xpk's say

    def test_has_only_fields_that_exist_and_several_slices_are_one_line_of_it(self):
        text = (POD / "jobset.yaml").read_text()
        (edit,) = re.findall(r"^sed '(s/replicas.*?)' examples/pod/jobset.yaml", README, re.M)
        two = yaml.safe_load(run_command("sed", edit, input=text).stdout)
        assert list(VALIDATOR.iter_errors(two)) == []
        assert two["spec"]["replicatedJobs"][0]["replicas"] == 2
        two["spec"]["replicatedJobs"][0]["replicas"] = 1
        assert two == JOBSET
        # What launch holds against GKE's MEGASCALE_NUM_SLICES is the same number.
        variables = {one["name"]: one for one in CONTAINER["env"]}
        field = variables[EXPECTED]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']"

    def test_paths_are_on_volumes_that_are_claimed_for_many_hosts(self):
        mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in POD_SPEC["volumes"]}
        for flag in CONTAINER["command"]:
            if "=/" in flag:
                assert flag.split("=")[1].startswith(tuple(f"{path}/" for path in mounts.values()))
        volumes = yaml.safe_load_all((POD / "volumes.yaml").read_text())
        claims = {claim["metadata"]["name"]: claim["spec"] for claim in volumes}
        sources = [volume.get("persistentVolumeClaim") for volume in POD_SPEC["volumes"]]
        assert {source["claimName"] for source in sources if source} == set(claims)
        assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())


def texts():
    """Every recipe as logical lines: a trailing backslash continues one."""
    for path in RECIPES:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        if path.name == "jobset.yaml":
            text += "\n" + shlex.join(CONTAINER["command"])
        yield path.name, text


def named_flags(script):
    """Flags that recipes give ``script``, with where."""
    for name, text in texts():
        for line in text.splitlines():
            _, found, rest = line.partition(f"examples/{script} ")
            for flag in re.findall(r"(?<![\w-])--(\w+)", rest) if found else ():
                yield flag, name


@pytest.mark.parametrize(
    "script, needed", [("train_vit.py", {"data_dir", "ckpt_dir"}), ("train_mnist.py", set())]
)
def test_flags_exist(script, needed):
    path = ROOT / "examples" / script
    beside = (ROOT / f"examples/{name}.py" for name in ("image_batches", "sampling", "wrapping"))
    sources = [path, *beside, *(ROOT / "examples" / "common").glob("*.py")]
    defined = {"help", "helpfull"}
    for source in sources:
        defined |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source.read_text()))
    named = set(named_flags(script))
    assert needed <= {flag for flag, _ in named} <= defined, named


def commands_of_the_readme():
    blocks = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
    ours = re.compile(r"^(examples/pod/\w+\.sh|python examples/pod/\w+\.py)")
    return [line for line in lines if ours.match(line)]


@pytest.mark.parametrize("line", commands_of_the_readme())
def test_commands_of_the_readme_are_understood(line):
    dry = re.sub(r"(\.sh|ray_train\.py)", r"\1 --dry_run", line, count=1)
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    dry = dry.replace("python ", f"{shlex.quote(sys.executable)} ", 1) if "ray" in dry else dry
    assert run_command("bash", "-c", dry, cwd=ROOT, env=env).stdout


def test_preflight_has_the_flags_that_check_gives_it():
    text = (ROOT / "xla_fsdp/pods/command_line.py").read_text()
    (check,) = re.findall(r"^check\(\).*?^}", (POD / "tpu_vm.sh").read_text(), re.M | re.S)
    flags = set(re.findall(r"(?<![\w-])--\w+(?= )", check.replace("--ckpt_dir=*", "")))
    assert {"--tpu", "--ckpt_dir"} <= flags
    assert [flag for flag in sorted(flags) if f'"{flag}"' not in text] == []


def test_the_image_has_what_is_installed():
    docker = (POD / "Dockerfile").read_text()
    for copied in re.findall(r"^COPY (.+)$", docker, re.M):
        assert all((ROOT / path).exists() for path in copied.split()[:-1]), copied
    packages = re.search(r"package_dir=\{(.*?)\}", (ROOT / "setup.py").read_text()).group(1)
    for folder in ["xla_fsdp", *re.findall(r': "(\w+)"', packages)]:
        assert f"COPY {folder} {folder}\n" in docker


SCRIPTS = sorted(POD.glob("*.sh"))
PLACE = ("--name=vit", "--zone=us-x1-a")
RUN = ("start", "wait", "--", "bash", "-c")


def run(script, *arguments, env=None, **how):
    env = {**os.environ, "PYTHON": sys.executable, **(env or {})}
    return run_command("bash", POD / script, *arguments, env=env, **how)


def test_shellcheck_has_nothing_to_say():
    run_command(Path(sysconfig.get_path("scripts"), "shellcheck"), *SCRIPTS)
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("tpu_vm.sh", [], "no action given"),
        ("tpu_vm.sh", ["run"], "unknown action 'run'"),
        ("tpu_vm.sh", ["stop"], "--name is required"),
        ("tpu_vm.sh", [*PLACE, "create"], "create needs --type"),
        ("tpu_vm.sh", [*PLACE, "start"], "start needs a command after --"),
        ("tpu_vm.sh", [*PLACE, "--zones=x", "stop"], "unknown option '--zones=x'"),
        ("tpu_vm.sh", ["--name=", "stop"], "--name needs a value"),
        ("tpu_vm.sh", [*PLACE, "--run=a b", "stop"], "--run must be a plain name"),
        ("tpu_vm.sh", [*PLACE, "--poll=soon", "wait"], "--poll must be a number"),
        ("tpu_vm.sh", [*PLACE, "--nfs=/share", "setup"], "--nfs must be SERVER:/DIR"),
        ("tpu_vm.sh", [*PLACE, "--max_restarts=1", "wait"], "needs the command after --"),
        ("tpu_vm.sh", [*PLACE, "--slices=two", "stop"], "must be numbers from 1 on, got 'two'"),
        ("tpu_vm.sh", [*PLACE, "--only=0", "stop"], "--only and --min_slices need --slices=2"),
        ("tpu_vm.sh", [*PLACE, "--slices=2", "--only=0,2", "stop"], "must be numbers from 0 to 1"),
        ("tpu_vm.sh", [*PLACE, "--slices=2", "--only=1,1", "stop"], "names a slice twice: '1,1'"),
        ("tpu_vm.sh", [*PLACE, "--type=2xv4-8", "create"], "say --slices=2 --type=v4-8"),
        ("back_off.sh", [], "usage: back_off.sh COMMAND"),
        ("back_off.sh", ["--seconds", "x"], "must be numbers, got '10' and 'x'"),
        ("torchrun.sh", ["--slice=v4-33", "--", "x"], "there is no v4 slice of 33 TensorCores"),
        ("torchrun.sh", ["--nnodes=0", "--nproc=4", "--", "x"], "--nnodes must be a positive"),
        ("torchrun.sh", ["--slice=v4-8", "--nproc=4", "--", "x"], "--slice excludes --nnodes and"),
        ("torchrun.sh", ["--slice=v4-8", "--", "x"], "--rdzv_endpoint is required"),
        ("torchrun.sh", ["--slice", "v4-8", "--", "x"], "unknown option '--slice'"),
        ("torchrun.sh", ["--slice=2xv4-8", "--", "x"], "MEGASCALE_COORDINATOR_ADDRESS is not set"),
        ("torchrun.sh", ["--slice=2xv4-8", "--slice_id=2", "--rdzv_endpoint=h", "--", "x"],
         "--slice_id must be less than the number of slices in --slice=2x..., got '2'"),
        ("torchrun.sh", ["--slice=v4-8", "--slice_id=0", "--rdzv_endpoint=h", "--", "x"],
         "--slice_id must be less than"),
        ("worker.sh", ["start"], "usage:"),
        ("worker.sh", ["start", "../x", "true"], "RUN must be a plain name"),
        ("worker.sh", ["log", "never-ran"], "no run 'never-ran'"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_code_2(script, arguments, message, tmp_path):
    env = {"HOME": str(tmp_path), "TPU_WORKER_HOSTNAMES": "", "PYTHONPATH": str(ROOT)}
    done = run(script, *arguments, env=env, code=2)
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr


@pytest.fixture
def slice_of_two(tmp_path):
    """``slice_of_two(*arguments)`` runs tpu_vm.sh on a slice with hosts w0 and w1, folders here."""
    bin = tmp_path / "bin"
    bin.mkdir()
    gcloud = f'exec {sys.executable} -IS {ROOT}/test/pod_workers.py {tmp_path} "$@"'
    shell_script(bin / "gcloud", gcloud)
    shell_script(bin / "hostname", 'basename "$HOME"')
    for host in ("w0", "w1"):
        (tmp_path / host / "xla_fsdp" / "examples").mkdir(parents=True)
        shutil.copytree(POD, tmp_path / host / "xla_fsdp" / "examples" / "pod")

    def run_here(*arguments, **kwargs):
        env = {"PATH": f"{bin}:{os.environ['PATH']}", "PJRT_DEVICE": "", "BACK_OFF": "0"}
        return run("tpu_vm.sh", *PLACE, "--poll=0", *arguments, env=env, **kwargs)

    yield run_here
    run_here("stop", code=None)


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_a_run_starts_everywhere_and_ends_well(slice_of_two, tmp_path):
    script = 'echo "$1 on $(hostname) $PJRT_DEVICE"; sleep 1'
    done = slice_of_two(*RUN, script, "sh", "a b'c")
    assert sorted(done.stdout.splitlines()[:2]) == ["w0 started", "w1 started"]
    assert done.stdout.endswith("run 'train': all workers are done\n")
    assert slice_of_two("--worker=1", "logs").stdout == "a b'c on w1 TPU\n"
    assert (tmp_path / "w0/xla_fsdp_runs/train/log").read_text() == "a b'c on w0 TPU\n"
    assert sorted(slice_of_two("status").stdout.splitlines()) == ["w0 exited 0", "w1 exited 0"]


@pytest.mark.slow
def test_one_failing_worker_ends_the_run_on_all(slice_of_two, tmp_path):
    pid = tmp_path / "w0" / "xla_fsdp" / "pid"
    script = 'echo $$ > pid; [ "$(hostname)" = w0 ] && sleep 600; '
    script += f"until [ -s {pid} ]; do sleep 0.1; done; exit 3"
    done = slice_of_two("--run=r1", *RUN, script, code=3)
    assert "run 'r1': w1 exited 3; stopping all workers" in done.stderr
    assert ended(pid.read_text())
    assert "w0 exited 143" in slice_of_two("--run=r1", "status").stdout


@pytest.mark.slow
def test_a_run_is_started_again_and_a_slice_made_again(slice_of_two, tmp_path):
    with_pip(tmp_path)
    # The first time both workers are preempted in good order, the second time the slice is gone.
    script = f"""
echo x >> starts; n=$(wc -l < starts)
if [ $n = 1 ]; then exit 75; fi
if [ $n = 2 ] && [ "$(hostname)" = w0 ]; then echo PREEMPTED > {tmp_path}/state; fi"""
    done = slice_of_two("--max_restarts=3", "--type=v3-32", *RUN, script)
    assert re.findall(r"ended with 75; starting again in 0 s, (\d) of 3", done.stderr) == ["1", "2"]
    assert "slice vit is PREEMPTED" in done.stderr
    verbs = [call[2:4] for call in calls(tmp_path) if call[3] in ("create", "delete")]
    assert verbs == [["tpu-vm", "delete"], ["tpu-vm", "create"]]
    done = slice_of_two("--run=bad", "--max_restarts=2", *RUN, "exit 9", code=9)
    assert done.stderr.count("starting again") == 2


def test_the_pause_before_a_restart_grows_up_to_a_bound():
    def seconds(attempt, **env):
        return run("back_off.sh", "--seconds", attempt, env=env).stdout.strip()

    assert [seconds(n) for n in (0, 1, 2, 3, 6, 10**8)] == ["0", "10", "20", "40", "300", "300"]
    assert seconds(4, BACK_OFF="3") == "24"
    first = {"TORCHELASTIC_RESTART_COUNT": "0"}
    run("back_off.sh", "bash", "-c", "exit 75", env=first, code=75)


@pytest.mark.slow
def test_a_run_is_not_started_twice_and_can_be_stopped(slice_of_two):
    slice_of_two("start", "--", "sleep", "600")
    twice = slice_of_two("start", "--", "sleep", "600", code=None)
    assert twice.returncode != 0 and "run 'train' is running on w0" in twice.stderr
    assert sorted(slice_of_two("status").stdout.split()) == ["running", "running", "w0", "w1"]
    slice_of_two("stop")
    assert "running" not in slice_of_two("status").stdout


def with_pip(folder, hosts=("w0", "w1")):
    for host in hosts:
        (folder / host / "xla_fsdp/.venv/bin").mkdir(parents=True)
        pip = folder / host / "xla_fsdp/.venv/bin/pip"
        shell_script(pip, 'echo "$@" > pip-was-called-with')


def test_setup_copies_what_is_committed(slice_of_two, tmp_path):
    with_pip(tmp_path)
    slice_of_two("--project=p1", "setup", cwd=tmp_path)
    for host in ("w0", "w1"):
        copy = tmp_path / host / "xla_fsdp"
        assert (copy / "xla_fsdp/ranks/launch.py").is_file() and not (copy / ".git").exists()
        installed = (copy / "pip-was-called-with").read_text()
        # plan: --report=x.html needs matplotlib, and attention kernels need jax.
        assert installed == "install -q -e .[tpu,plan,examples] gcsfs\n"
    assert all("--project=p1" in call and "--worker=all" in call for call in calls(tmp_path))


def test_create_and_delete(slice_of_two, tmp_path):
    slice_of_two("--type=v3-32", "create", "delete")
    slice_of_two("--type=v5p-32", "--spot", "--queued", "create", "delete")
    verbs = [call[2:4] for call in calls(tmp_path)]
    assert verbs[:2] == [["tpu-vm", "create"], ["tpu-vm", "delete"]]
    assert verbs[2:] == [["queued-resources", verb] for verb in ("create", "describe", "delete")]
    assert {"--accelerator-type=v3-32", "--version=tpu-ubuntu2204-base"} <= set(calls(tmp_path)[0])
    queued = {"--node-id=vit", "--spot", "--runtime-version=v2-alpha-tpuv5"}
    assert queued <= set(calls(tmp_path)[2])


@pytest.fixture
def two_slices(slice_of_two, tmp_path):
    """As ``slice_of_two``, of two slices vit-0 and vit-1 with a host each."""
    for number in "01":
        (tmp_path / f"vit-{number}").mkdir()
        (tmp_path / f"w{number}").rename(tmp_path / f"vit-{number}/w{number}")
    yield lambda *arguments, **kwargs: slice_of_two("--slices=2", *arguments, **kwargs)
    slice_of_two("--slices=2", "stop", code=None)


def test_each_slice_is_told_which_it_is(two_slices, tmp_path):
    script = 'env | grep -E "^(MEGASCALE|XLA_FSDP_SL)" | sort > told'

    def told(host):
        path = next(tmp_path.glob(f"vit-*/{host}/xla_fsdp/told"))
        return dict(line.split("=") for line in path.read_text().split())

    two_slices(*RUN, script)
    for number in ("0", "1"):
        assert told(f"w{number}") == {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": number,
            "MEGASCALE_COORDINATOR_ADDRESS": "ip-of-vit-0:8080",
            "MEGASCALE_PORT": "8080",
            "XLA_FSDP_SLICES": "2",
        }
    two_slices("--only=1", "--run=rest", *RUN, script)
    assert told("w1")["MEGASCALE_NUM_SLICES"] == told("w1")["XLA_FSDP_SLICES"] == "1"
    assert not list(tmp_path.glob("vit-0/w0/xla_fsdp_runs/rest"))
    assert two_slices("--only=1", "status").stdout == "w1 exited 0\n"
    two_slices("--type=v5litepod-16", "create", "delete")
    made, _, deleted = calls(tmp_path)[-3:]
    assert made[2:5] == ["queued-resources", "create", "vit"]
    assert {"--node-count=2", "--node-prefix=vit"} <= set(made) and "--node-id=vit" not in made
    assert deleted[2:5] == ["queued-resources", "delete", "vit"]


@pytest.mark.slow
@pytest.mark.parametrize("least", ["1", "2"])
def test_a_lost_slice_ends_the_run_and_the_rest_goes_on(two_slices, tmp_path, least):
    """With one slice if that is enough, else with all of them made again."""
    with_pip(tmp_path / "vit-0", ["w0"])
    with_pip(tmp_path / "vit-1", ["w1"])
    script = f"""
echo x >> starts; [ $(wc -l < starts) = 2 ] && exit 0
[ "$MEGASCALE_NUM_SLICES" = 1 ] && exit 0
[ "$(hostname)" = w1 ] && echo PREEMPTED > {tmp_path}/vit-1/state && exit 1
echo $$ > pid; exec sleep 600"""
    options = ("--max_restarts=1", f"--min_slices={least}", "--type=v5litepod-16")
    done = two_slices(*options, *RUN, script, timeout=500)
    assert "not every worker answers; stopping all workers" in done.stderr
    assert "slice vit-1 is PREEMPTED" in done.stderr
    assert ended((tmp_path / "vit-0/w0/xla_fsdp/pid").read_text())
    rest = "continuing with 1 of 2 slices: vit-0" in done.stderr
    made = [call for call in calls(tmp_path) if call[3] == "create"]
    assert (rest, len(made)) == ((True, 0) if least == "1" else (False, 1))


def test_a_dry_run_prints_and_does_nothing(slice_of_two, tmp_path):
    actions = ["create", "setup", "check", "start", "wait", "status", "logs", "stop", "delete"]
    done = slice_of_two("--type=v3-32", "--dry_run", *actions, "--", "python", "a b.py")
    assert not (tmp_path / "calls").exists()
    lines = done.stdout.splitlines()
    assert len(lines) == 13 and lines[1].startswith("git -C ")
    assert lines[5] == (
        "gcloud compute tpus tpu-vm ssh vit --zone=us-x1-a --worker=all "
        r"'--command=cd ~/xla_fsdp && bash examples/pod/worker.sh start train python a\ b.py'"
    )


@pytest.mark.parametrize(
    ("slice", "nodes", "processes", "plain"),
    [("v4-32", 4, 4, False), ("v3-128", 16, 1, True), ("v6e-8", 1, 8, False)],
)
def test_torchrun_knows_slices(slice, nodes, processes, plain):
    env = {"TPU_WORKER_HOSTNAMES": "h0,h1", "PJRT_DEVICE": "", "PYTHONPATH": str(ROOT)}
    done = run("torchrun.sh", f"--slice={slice}", "--dry_run", "--", "x.py", "--a=b c", env=env)
    assert done.stdout.startswith("PJRT_DEVICE=TPU ") and done.stdout.endswith("'x.py' '--a=b c'\n")
    assert f"'--nnodes={nodes}' '--nproc-per-node={processes}'" in done.stdout
    assert "'--rdzv-endpoint=h0:29400'" in done.stdout
    assert ("TORCHELASTIC_RUN_ID" in done.stdout) == plain


def test_torchrun_knows_several_slices():
    def said(*options, **env):
        env = {"PJRT_DEVICE": "", "PYTHONPATH": str(ROOT), **env}
        options = ("--slice=2xv5litepod-16", *options, "--dry_run", "--", "x.py")
        return run("torchrun.sh", *options, env=env).stdout

    text = said(MEGASCALE_COORDINATOR_ADDRESS="vit-slice-0-0.vit:8080", MEGASCALE_SLICE_ID="1")
    assert "XLA_FSDP_SLICES=2 " in text and "'--nnodes=8' '--nproc-per-node=4'" in text
    assert "'--rdzv-endpoint=vit-slice-0-0.vit:29400'" in text
    text = said("--slice_id=1", "--rdzv_endpoint=10.0.0.2:5555")
    assert text.startswith(
        "MEGASCALE_NUM_SLICES=2 MEGASCALE_SLICE_ID=1 MEGASCALE_COORDINATOR_ADDRESS=10.0.0.2:8080 "
        "XLA_FSDP_SLICES=2 PJRT_DEVICE=TPU "
    )
    assert "'--rdzv-endpoint=10.0.0.2:5555'" in text


MEETING = """
import os
import torch.distributed as dist, torch_xla.runtime as xr
from torch_xla._internal import rendezvous
from xla_fsdp import launch

me = int(os.environ["RANK"])
# As on a slice where every process has a chip: on a CPU each is a world of its own.
xr.world_size, xr.global_ordinal = lambda: 2, lambda: me

def rank_main(rank, greeting):
    rendezvous._store.set(f"from {rank}", greeting)
    other = rendezvous._store.get(f"from {1 - rank}").decode()
    print(f"rank {rank} local {os.environ['LOCAL_RANK']} of {dist.get_world_size()}: {other}")

assert launch(rank_main, (f"hello from {me}",)) is None
"""


@pytest.mark.full
def test_two_hosts_meet_and_have_global_ranks(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    env = {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    with ThreadPoolExecutor(2) as hosts, free_port() as port:
        options = ("--nnodes=2", "--nproc=1", f"--rdzv_endpoint=localhost:{port}", "--", script)
        done = list(hosts.map(lambda _: run("torchrun.sh", *options, env=env), range(2)))
    lines = [line for host in done for line in host.stdout.splitlines()]
    assert sorted(line for line in lines if line.startswith("rank ")) == [
        "rank 0 local 0 of 2: hello from 1",
        "rank 1 local 0 of 2: hello from 0",
    ]
