"""A topology's name means the slice that Cloud TPU documents and that libtpu describes."""

import dataclasses
import json
import os
import sys

import pytest
from on_ranks import raises
from processes import run_command

from xla_fsdp.tpu.topology import UnknownTopologyError, resolve, slice_names


class TestNames:
    @pytest.mark.parametrize(
        ("name", "libtpu_name", "devices", "chips", "hosts"),
        [
            ("v2-8", "v2:2x2", 8, 4, 1),
            ("v3-2048", "v3:32x32", 2048, 1024, 256),
            ("v4-4096", "v4:8x16x16", 2048, 2048, 512),
            ("v5litepod-256", "v5e:16x16", 256, 256, 64),
            ("v5p-640", "v5p:4x4x20", 320, 320, 80),
            ("v5p-12288", "v5p:16x16x24", 6144, 6144, 1536),
            ("v6e-4", "v6e:2x2", 4, 4, 1),
            ("tpu7x-8", "tpu7x:2x2x1", 8, 4, 1),
            ("tpu7x-4224", "tpu7x:4x12x44", 4224, 2112, 528),
            ("tpu7x-18432", "tpu7x:16x24x24", 18432, 9216, 2304),
            ("v4:4x4x12", "v4:4x4x12", 192, 192, 48),
        ],
    )
    def test_means_the_documented_slice(self, name, libtpu_name, devices, chips, hosts):
        found = resolve(name)
        assert found.name == name
        assert (found.libtpu_name, found.devices) == (libtpu_name, devices)
        assert (found.chips, found.hosts) == (chips, hosts)

    def test_counts_what_its_family_counts(self):
        for name in slice_names():
            found = resolve(name)
            assert found.name == name
            unit = 1 if found.chip.family in ("v5e", "v6e") else found.chip.tensor_cores
            assert found.chips * unit == int(name.partition("-")[2]), name
            assert dataclasses.replace(resolve(found.libtpu_name), name=name) == found

    @pytest.mark.parametrize(
        ("other", "name"),
        [
            ("V3-8", "v3-8"), (" v3-8\n", "v3-8"), ("v5e-8", "v5litepod-8"),
            ("v5litepod:4x4", "v5e:4x4"), ("v3:8x8x1", "v3:8x8"),
        ],
    )  # fmt: skip
    def test_other_spellings(self, other, name):
        assert dataclasses.replace(resolve(other), name=name) == resolve(name)


class TestWiring:
    @pytest.mark.parametrize(
        ("name", "wraps"),
        [
            ("v3-128", (False, False)),
            ("v3-1024", (False, True)),
            ("v2-512", (True, True)),
            ("v4-64", (False, False, False)),
            ("v4-128", (True, True, True)),
            ("v5litepod-128", (False, True)),
            ("v6e-256", (True, True)),
            ("tpu7x-128", (True, True, True)),
        ],
    )
    def test_which_axes_are_rings(self, name, wraps):
        assert resolve(name).wraps == wraps

    def test_options_of_libtpu(self):
        found = resolve("v5litepod-128")
        assert found.options == {"chips_per_host_bounds": [2, 2, 1], "wrap": [0, 1, 0]}
        ringless = dataclasses.replace(found, wraps=(False, False))
        assert ringless.options["wrap"] == [0, 0, 0]
        assert resolve("v4-8").options["chip_config_name"] == "megacore"


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "reason", "closest"),
        [
            ("v3-12", "no v3 slice of 12 TensorCores", "v3-8"),
            ("v5e-7", "no v5e slice of 7 chips", "v5litepod-8"),
            ("v4-130", "no v4 slice of 130 TensorCores", "v4-128"),
            ("tpu7x:4x8x2", "all multiples of 4", None),
            ("v7-8", "no TPU family 'v7'", "v4-8"),
            ("v3:8x8x2", "2 axes, not 3", "v3:8x8"),
            ("v4:4x4", "3 axes, not 2", "v4:4x4x8"),
            ("v5e:32x32", "pod has 16x16 chips", None),
            ("v4:32x32x32", "32768 chips; the largest v4 slice has 4096", None),
            ("v5e:3x5", "must be even", None),
            ("v3:1x1", "smallest v3 slice", None),
            ("v3:8x0", "at least one chip", None),
            ("v4:4xfourx4", "chips along each axis", None),
            ("", "no TPU family ''", None),
        ],
    )
    def test_says_why_and_what_there_is(self, name, reason, closest):
        with pytest.raises(UnknownTopologyError) as info:
            resolve(name)
        error = info.value
        assert isinstance(error, ValueError) and error.name == name
        assert reason in error.reason
        for offered in ("v2-8", "v3-8", "v4-8", "v5litepod-1", "v5p-8", "v6e-1", "v4:4x4x8"):
            assert offered in str(error)
        if closest:
            assert error.closest[0] == closest
        assert all(resolve(known) for known in error.closest)

    def test_a_name_is_a_string(self):
        raises(TypeError, "v3-128", resolve, 8)


def test_names_of_several_slices():
    two = resolve("2xv5litepod-256")
    assert (two.devices, two.chips, two.hosts, two.count) == (512, 512, 128, 2)
    assert two.options["num_slices"] == 2 and "num_slices" not in resolve("v5litepod-256").options
    assert two.coordinates() == resolve("v5litepod-256").coordinates()
    assert resolve("4xv4:2x2x1").devices == 16
    assert resolve("1xv3-8").devices == 8
    for name, reason in (("2xv3-8", "v3 slices are not joined"), ("0xv4-8", "0 slices")):
        raises(UnknownTopologyError, reason, resolve, name)
    raises(UnknownTopologyError, "no v5litepod slice of 7", resolve, "2xv5litepod-7")


# What the compiler says, in a process of its own: libtpu must not meet torch_xla's.
ASK = """
import json, sys
from jax.experimental.topologies import get_topology_desc

answers = []
for name, options in json.loads(sys.argv[1]):
    devices = get_topology_desc(topology_name=name, platform="tpu", **options).devices
    devices = sorted(devices, key=lambda device: device.id)
    answers.append(
        {
            "ids": [device.id for device in devices],
            "places": [[*device.coords, device.core_on_chip] for device in devices],
            "hosts": len({device.process_index for device in devices}),
            "kind": devices[0].device_kind,
        }
    )
print(json.dumps(answers))
"""


def check_slices(names, python=sys.executable, environment=os.environ):
    slices = [resolve(name) for name in names]
    question = json.dumps([(found.libtpu_name, found.options) for found in slices])
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = run_command(python, "-c", ASK, question, env={**environment, **quiet})
    answers = json.loads(done.stdout)
    for found, answer in zip(slices, answers, strict=True):
        assert answer["ids"] == list(range(found.devices)), found
        assert answer["places"] == [list(place) for place in found.coordinates()], found
        assert (answer["hosts"], answer["kind"]) == (found.hosts, found.chip.device_kind)


def test_libtpu_describes_the_same_slices():
    small = ("v2-8", "v3-128", "v4-8", "v4-128", "v5litepod-1", "v5litepod-8")
    check_slices((*small, "v5p-8", "v6e-256"))
