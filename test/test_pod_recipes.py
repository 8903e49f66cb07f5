"""examples/pod: the JobSet against its schema and the table of slices, and every command that the
recipes name against the scripts that have to understand it."""

import json
import os
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path

import jsonschema
import pytest
import yaml

from xla_fsdp.ranks.slices import EXPECTED
from xla_fsdp.tpu.topology import resolve

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.fixture(scope="module")
def validator():
    schema = json.loads((ROOT / "test" / "data" / "jobset_schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def job():
    (replicated,) = JOBSET["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod():
    return job()["template"]["spec"]


def container():
    (container,) = pod()["containers"]
    return container


class TestJobSet:
    def test_has_only_fields_that_exist(self, validator):
        assert [error.message for error in validator.iter_errors(JOBSET)] == []

    def test_one_pod_for_each_host_of_the_slice(self):
        selector = pod()["nodeSelector"]
        shape = selector["cloud.google.com/gke-tpu-topology"]
        family = GENERATIONS[selector["cloud.google.com/gke-tpu-accelerator"]]
        slice = resolve(f"{family}:{shape}")
        resources = container()["resources"]
        chips = resources["limits"]["google.com/tpu"]
        assert resources["requests"] == resources["limits"] == {"google.com/tpu": chips}
        assert chips == prod(slice.chips_per_host)
        assert job()["parallelism"] == job()["completions"] == slice.hosts
        assert job()["completions"] * chips == prod(map(int, shape.split("x")))
        assert slice.shape == resolve("v6e-64").shape  # as the file's first line and xpk's say

    def test_a_failing_host_restarts_all(self):
        assert job()["completionMode"] == "Indexed"
        assert job()["backoffLimit"] == 0 and pod()["restartPolicy"] == "Never"
        assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0
        (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        (disruption,) = job()["podFailurePolicy"]["rules"]
        assert disruption["action"] == "FailJob"
        assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        annotations = JOBSET["metadata"]["annotations"]
        assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in annotations

    def test_several_slices_are_one_line_of_it(self, validator):
        text = (POD / "jobset.yaml").read_text()
        (edit,) = re.findall(r"^sed '(s/replicas.*?)' examples/pod/jobset.yaml", README, re.M)
        done = subprocess.run(["sed", edit], input=text, capture_output=True, text=True)
        two = yaml.safe_load(done.stdout)
        assert list(validator.iter_errors(two)) == []
        assert two["spec"]["replicatedJobs"][0]["replicas"] == 2
        two["spec"]["replicatedJobs"][0]["replicas"] = 1
        assert two == JOBSET
        # What launch holds against GKE's MEGASCALE_NUM_SLICES is the same number.
        variables = {one["name"]: one for one in container()["env"]}
        field = variables[EXPECTED]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']"

    def test_paths_are_on_volumes(self):
        mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod()["volumes"]}
        for flag in container()["command"]:
            if "=/" in flag:
                assert flag.split("=")[1].startswith(tuple(f"{path}/" for path in mounts.values()))

    def test_volumes_are_claimed_for_many_hosts(self):
        volumes = yaml.safe_load_all((POD / "volumes.yaml").read_text())
        claims = {claim["metadata"]["name"]: claim["spec"] for claim in volumes}
        sources = [volume.get("persistentVolumeClaim") for volume in pod()["volumes"]]
        assert {source["claimName"] for source in sources if source} == set(claims)
        assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())


def texts():
    """Every recipe as logical lines: a trailing backslash continues one."""
    for path in RECIPES:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        if path.name == "jobset.yaml":
            text += "\n" + shlex.join(container()["command"])
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
    done = subprocess.run(
        ["bash", "-c", dry], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


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
