"""One record holds every constant of a TPU generation; a new generation is a new record."""

import ast
import dataclasses
import re
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from on_ranks import raises, without_ranks
from planned import training_step
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel, compiler_options
from xla_fsdp.collectives.routes import attributes_of, routes_for
from xla_fsdp.compiled.host_options import host_options
from xla_fsdp.layers import attention
from xla_fsdp.layers.attention import splash_attention
from xla_fsdp.layers.linear import stores_input
from xla_fsdp.planning.records import Op, Schedule
from xla_fsdp.planning.timing import time_step
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu import chips
from xla_fsdp.tpu.calibration import Calibration
from xla_fsdp.tpu.chips import CHIPS, GIB, LAUNCH
from xla_fsdp.tpu.links import OneCollective, collective_seconds, describe_links
from xla_fsdp.tpu.topology import UnknownTopologyError, resolve, slice_names

# Multiplier units of each chip times their size; see chips.py for v6e.
MULTIPLIERS = {
    "v2": 2 * 128**2, "v3": 4 * 128**2, "v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2,
    "v6e": 4 * 256**2, "tpu7x": 8 * 256**2,
}  # fmt: skip


@pytest.mark.parametrize("family", CHIPS)
def test_figures_fit_together_and_those_of_reports_have_a_source(family):
    chip = CHIPS[family]
    assert chip.device_flops * chip.devices == chip.flops
    assert chip.device_usable_hbm_bytes() * chip.devices == chip.usable_hbm_bytes
    assert chip.device_hbm_bandwidth * chip.devices == chip.hbm_bandwidth
    assert 2 * MULTIPLIERS[family] * chip.clock_hz == pytest.approx(chip.flops, rel=0.01)
    # The compiler reserves some of the memory.
    assert 0.9 * chip.hbm_bytes < chip.usable_hbm_bytes < chip.hbm_bytes
    assert max(map(prod, chip.slices.values())) == chip.largest_slice <= prod(chip.pod)
    assert all(len(shape) == chip.torus_dimension for shape in chip.slices.values())
    figures = {"usable_hbm_bytes", "link_bandwidth", "hop_latency"}
    figures |= {"host_memory", "pcie_bandwidth"}
    figures |= {"dcn_bandwidth"} if chip.dcn_bandwidth else set()
    figures |= {"die_bandwidth"} if chip.die_bandwidth else set()
    assert set(chip.sources) == figures
    assert bool(chip.dcn_bandwidth) == (family not in ("v2", "v3"))


def test_tpu7x_has_two_devices_that_exchange_inside_the_chip():
    where = resolve("tpu7x-8")
    chip = where.chip
    assert (chip.device_flops, chip.hbm_bytes // chip.devices) == (1153.5e12, 96 * GIB)
    for kind, groups, size in (
        ("all-gather", tuple((2 * n, 2 * n + 1) for n in range(4)), 10**9 // 2),
        ("collective-permute", ((0, 1), (1, 0)), 10**9),
    ):
        seconds = collective_seconds(OneCollective(kind, 10**9, groups), where)
        assert seconds == pytest.approx(LAUNCH + size / 1080e9)
    assert "exchange at 1080 GB/s" in describe_links(where)
    # tpu-recipes measure 178.8 GB/s a device for 403 MB on 2x2x1.
    size = 403 * 10**6
    seconds = collective_seconds(OneCollective("all-gather", size, (tuple(range(8)),)), where)
    assert size * 7 / 8 / seconds == pytest.approx(178.8e9, rel=0.02)


# What no generation is: a torus of three axes with two ranks a chip, and overlapped gathers.
MADE_UP = dataclasses.replace(
    CHIPS["tpu7x"], family="v9x", accelerator="v9pod", generation=9, device_kind="TPU v9 extra",
    pci_device="0x0099", flops=1e15, clock_hz=2e9, matrix_unit=512, pod=(8, 8, 8),
    shapes=((2, 2, 1), (2, 2, 2)), largest_slice=512, link_bandwidth=100e9, die_bandwidth=0.0,
    along_all_axes=False, refused_by=(), stores_linear_inputs=True, host_memory={4: 1000},
    scoped_vmem_kib=65536, overlaps_gathers=True, crashes_on_fused_loops=True,
    sources={**CHIPS["tpu7x"].sources, "link_bandwidth": "made up; not measured"},
)  # fmt: skip


def added():
    return mock.patch.dict(chips._BY_FAMILY, {MADE_UP.family: MADE_UP})


def test_a_new_record_has_named_slices():
    with added():
        assert {"v9pod-8", "v9pod-16", "v9pod-128", "v9pod-1024"} <= set(slice_names())
        for name in ("v9pod-16", "v9x-16", "v9pod:2x2x2", "v9x:2x2x2"):
            where = resolve(name)
            assert (where.chip, where.shape, where.devices) == (MADE_UP, (2, 2, 2), 16)
        assert where.libtpu_name == "v9x:2x2x2" and not any(where.wraps)
        assert (where.hosts, where.host_memory) == (2, 1000 * 10**9)
        assert all(resolve("v9x:4x4x8").wraps)
        assert resolve("2xv9pod-8").devices == 16
        with pytest.raises(UnknownTopologyError) as info:
            resolve("v9x-17")
        assert "there is no v9x slice of 17 TensorCores" in str(info.value)
        assert info.value.closest[0] == "v9pod-16"
        assert "v9pod-8, 16 and multiples of 128 to 1024" in str(info.value)
        assert "v9x-N is v9pod-N" in str(info.value) and "tpu7x:, v9x:" in str(info.value)
    raises(UnknownTopologyError, "no TPU family 'v9pod'", resolve, "v9pod-8")


def test_a_new_record_has_times_and_routes():
    with added():
        where = resolve("v9pod-8")
        gather = OneCollective("all-gather", 8 * 10**6, (tuple(range(8)),))
        expected = LAUNCH + 2e-6 + 7e6 / (2 * 100e9)
        assert collective_seconds(gather, where) == pytest.approx(expected)
        assert "100 GB/s a link" in describe_links(
            where
        ) and "(bandwidth: made up)" in describe_links(where)
        found = routes_for(MADE_UP.device_kind, attributes_of(where))
        assert found is not None and found.slice.chip is MADE_UP
        assert found.gather(8 * 10**6).seconds == pytest.approx(expected)
        schedule = Schedule(2, (Op(0, "f", "fusion", 4_000_000),), (), (), (0,) * 2, 0)
        assert time_step(schedule, where, 1.0).compute == pytest.approx(2e-3)
        measured = Calibration("v9x", link_bandwidth=90e9).apply(where.chip)
        assert measured.link_bandwidth == 90e9 and measured.host_memory == MADE_UP.host_memory


def test_a_new_record_has_compiler_options(tmp_path, monkeypatch):
    with added():
        large = compiler_options.for_large_matmuls("v9x")
        assert large == {"xla_tpu_scoped_vmem_limit_kib": "65536"}
        told = host_options(MADE_UP, environ={})
        assert "--xla_tpu_sliced_prefetch_max_slices=0" in told.arguments
        (tmp_path / "0").mkdir()
        for name, text in (("vendor", "0x1ae0\n"), ("device", "0x0099\n")):
            (tmp_path / "0" / name).write_text(text)
        assert compiler_options.this_hosts_chip(tmp_path) is MADE_UP
        given = f"--{compiler_options._BESIDE_ELEMENTS}=true --xla_other=1"
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        with pytest.raises(RuntimeError, match="on TPU v9 extra the TPU compiler crashes"):
            compiler_options.require_loops_compile(MADE_UP.device_kind)
        monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_other=1")  # what the message recommends
        compiler_options.require_loops_compile(MADE_UP.device_kind)


@without_ranks
def test_a_new_record_is_traced():
    made = []

    def call(function, settings, tensors):
        made.append((function, settings))
        return [tensors[0]]

    def step():
        training_step(lambda: XlaFullyShardedDataParallel(nn.Linear(64, 32)), 8, 64)()
        heads = torch.ones(1, 1, 128, 64).to("xla")
        attention.scaled_dot_product_attention(heads, heads, heads, implementation="kernel")

    with added(), mock.patch.object(attention, "call", call):
        where = resolve("v9pod-8")
        assert trace_step(step, 0, where.devices, where).program.hlo
        ((function, splash),) = made
        assert function is splash_attention and splash.matrix_unit == 512
        world = SimpleNamespace(device_kind=MADE_UP.device_kind)
        assert stores_input(nn.Linear(8, 4), world) and not stores_input(nn.Linear(4, 8), world)


# What is not about a generation of chips, or is an example in a message.
EXCEPTIONS = {
    "pods/tpu_api.py": ["version=v2"],  # of the TPU API
    "pods/node.py": ["a node as in v1 or v2 of the TPU API", "such as v4-32"],
    "pods/command_line.py": ["such as v3-32", "such as v5litepod-8"],
    "ranks/launch.py": ["On v2 and v3, where a process has two ranks"],
}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_other_file_names_a_generation():
    """Neither in a string nor as a name; comments and docstrings may."""
    called = {n for c in CHIPS.values() for n in (c.family, c.accelerator, c.device_kind)}
    called |= {f"V{c.family[1:].upper()}" for c in CHIPS.values()}  # records
    pattern = re.compile(rf"(?<![\w/])(?:{'|'.join(map(re.escape, called))})(?!\w)")
    package, found = Path(xla_fsdp.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        name, source = path.relative_to(package).as_posix(), path.read_text()
        tree = ast.parse(source if pattern.search(source) else "")
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
        code = ast.unparse(tree)
        for reviewed in EXCEPTIONS.get(name, []):
            assert reviewed in code, (name, reviewed)
            code = code.replace(reviewed, "", 1)
        found += [] if name.startswith("tpu/") else [(name, one) for one in pattern.findall(code)]
    assert not found
