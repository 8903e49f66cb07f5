"""What the TPU compiler is told: by a launch, and in a plan, the same; and as libtpu reads it."""

import json
import os
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch_xla
from on_ranks import without_ranks
from planned import training_step
from torch import nn
from torch_xla._internal import tpu

from xla_fsdp import XlaFullyShardedDataParallel, compiler_options, plan
from xla_fsdp.compiled.host_options import HostOptions, host_options
from xla_fsdp.compiler_options import (
    OPTIONS,
    add_to_environment,
    for_large_matmuls,
    limit_scoped_vmem,
)
from xla_fsdp.planning.compiling.compiler import Target
from xla_fsdp.planning.compiling.progress import Progress
from xla_fsdp.planning.tracing.traced import PartitionedProgram
from xla_fsdp.ranks import launch, spawned
from xla_fsdp.tpu import libtpu_flags
from xla_fsdp.tpu.chips import CHIPS
from xla_fsdp.tpu.libtpu_flags import Refusal, library, parse_arguments, refusal, with_undefok

VMEM = "xla_tpu_scoped_vmem_limit_kib"
# For each family a slice, and what torch_xla 2.9 adds beside its four flags for all.
V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
FAMILIES = {
    "v3-8": (3, {}, None),
    "v4-8": (4, {}, "megacore_dense"),
    "v5litepod-8": (5, V5, None),
    "v5p-8": (5, V5, None),
    "v6e-8": (6, {}, None),
}
USERS = (
    "",
    "--xla_tpu_use_enhanced_launch_barrier --noxla_tpu_enable_flash_attention "
    "-xla_tpu_sliced_prefetch_max_slices 2 --xla_no_such_flag=1 xla_enable_async_all_gather=false",
)
UNSET = ("LIBTPU_INIT_ARGS", "TPU_MEGACORE", "PJRT_DEVICE")


@contextmanager
def environment(**changes):
    with mock.patch.dict(os.environ, changes):
        for name in UNSET:
            if name not in changes:
                os.environ.pop(name, None)
        yield


def launched(version, user):
    """What the processes of ranks would find on a TPU host with chips of this generation."""
    there = {}

    def run(fn, args):
        torch_xla._setup_default_env()  # what importing torch_xla does in each
        there.update({name: os.environ.get(name) for name in UNSET[:2]})

    with (
        mock.patch.object(tpu, "version", lambda: version),
        mock.patch.object(tpu, "num_available_chips", lambda: 4),
        mock.patch.object(spawned, "run_spawned", run),
        environment(PJRT_DEVICE="TPU", LIBTPU_INIT_ARGS=user),
    ):
        torch_xla._setup_default_env()
        launch.launch(json.dumps)
        # A plan of that process does not take torch_xla's options for the user's.
        of_v3 = host_options(CHIPS["v3"]).arguments
        assert host_options(CHIPS["v3"], environ={"LIBTPU_INIT_ARGS": user}).arguments == of_v3
    return there


class Asked(Exception):
    pass


def planned(topology, user, launcher="xla_fsdp"):
    def run(self, folder, *_):
        raise Asked((folder / "request.json").read_text())

    with (
        mock.patch.object(Target, "_run", run),
        environment(PJRT_DEVICE="CPU", LIBTPU_INIT_ARGS=user),
        pytest.raises(Asked) as asked,
    ):
        step = training_step(lambda: XlaFullyShardedDataParallel(nn.Linear(64, 64)), 8, 64)
        plan(step, topology, cache=False, progress=False, ranks=[0], launcher=launcher)
    return json.loads(str(asked.value))


@pytest.mark.slow
@without_ranks
def test_the_same_in_a_launch_and_in_a_plan():
    for user in USERS:
        for topology, (version, further, megacore) in FAMILIES.items():
            if user and topology not in ("v4-8", "v5litepod-8"):
                continue
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = launched(version, user)
                request = planned(topology, user)
                plain = planned(topology, user, "torch_xla")
            messages = [str(one.message) for one in said if "libtpu" in str(one.message)]
            unknown = "libtpu does not know xla_no_such_flag: ignored"
            dashes = "libtpu ignores xla_enable_async_all_gather=false: write --xla_enable_"
            assert messages.count(unknown) == (4 if user else 0), messages
            assert sum(one.startswith(dashes) for one in messages) == (5 if user else 0), messages

            assert found["LIBTPU_INIT_ARGS"] == request["arguments"], topology
            assert found["TPU_MEGACORE"] == megacore
            config = request["topology_options"].get("chip_config_name")
            assert config == megacore, (topology, config)

            told = parse_arguments(request["arguments"])
            if user:  # torch_xla takes a name without dashes for given, and libtpu ignores it
                further = {k: v for k, v in further.items() if k != "xla_enable_async_all_gather"}
            assert told.items() >= further.items() and not set(told) & (V5.keys() - further)
            assert set(told) >= {*OPTIONS, "xla_latency_hiding_scheduler_rerun"}
            flash, slices = "xla_tpu_enable_flash_attention", "xla_tpu_sliced_prefetch_max_slices"
            assert told[flash] == "false" and told[slices] == ("2" if user else OPTIONS[slices])
            if user:
                assert told["xla_tpu_use_enhanced_launch_barrier"] == "true"
            assert refusal(request["arguments"], library()) == Refusal()
            # What the users of in-tree get.
            assert set(parse_arguments(plain["arguments"])) == ({*told} - {*OPTIONS}) | {
                *parse_arguments(user)
            }


@pytest.mark.slow
@without_ranks
def test_read_as_libtpu_reads():
    arguments = (
        "--xla_tpu_sliced_prefetch_max_slices=1 --xla_tpu_sliced_prefetch_max_slices=3 "
        "--noxla_tpu_enable_flash_attention -xla_latency_hiding_scheduler_rerun 7 "
        "--xla_tpu_prefer_async_allgather_to_allreduce --xla_gone=1 xla_jf_crs_combiner=no "
        "-- --xla_tpu_sliced_prefetch_max_slices=9"
    )
    names = parse_arguments(arguments)
    assert names == {
        "xla_tpu_sliced_prefetch_max_slices": "3",
        "xla_tpu_enable_flash_attention": "false",
        "xla_latency_hiding_scheduler_rerun": "7",
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
        "xla_gone": "1",
    }
    text = """
    module { func.func public @main(%x: tensor<8x128xf32> {mhlo.sharding = "{replicated}"})
      -> tensor<8x128xf32> { %y = stablehlo.add %x, %x : tensor<8x128xf32>
      return %y : tensor<8x128xf32> } }"""
    program = PartitionedProgram(text.encode(), "doubled", False, 4, ("x",), {}, 1, 4, 1.0)
    over = libtpu_flags.with_last(
        with_undefok(arguments, ["xla_gone"]), {"xla_tpu_sliced_prefetch_max_slices": "5"}
    )
    target = Target.of("v5e:2x2", None, "xla_fsdp", None, False, Progress(None))
    compiled = [
        target.compile(program, HostOptions(one, None, dict.fromkeys(names, "a test")))
        for one in (with_undefok(arguments, ["xla_gone"]), over)
    ]
    del names["xla_gone"]
    assert compiled[0].options == names
    assert compiled[1].options == {**names, "xla_tpu_sliced_prefetch_max_slices": "5"}


def test_options_for_large_matmuls_are_those_of_the_chips(tmp_path, monkeypatch):
    from jax._src.hardware_utils import _TPU_PCI_DEVICE_IDS

    for chip in CHIPS.values():
        if chip.pci_device is not None:
            assert _TPU_PCI_DEVICE_IDS[chip.pci_device].name == chip.family
    # Neither another maker's nor a network card is a TPU.
    (tmp_path / "0").mkdir()
    for vendor, device in (("0x8086", "0x006f"), ("0x1ae0", "0x0042")):
        (tmp_path / "0" / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "0" / "device").write_text(f"{device}\n")
        assert compiler_options.this_hosts_chip(tmp_path) is None

    assert for_large_matmuls("v3") == for_large_matmuls("v4") == {}
    with pytest.raises(ValueError, match=r"family must be one of .*v5e.*, got 'v5litepod'"):
        for_large_matmuls("v5litepod")  # set nothing, silently
    for kib in (0, "49152"):
        with pytest.raises(ValueError, match="kib must be a number of KiB from 1 on"):
            limit_scoped_vmem(kib)
    monkeypatch.setattr(compiler_options, "this_hosts_chip", lambda: None)
    assert for_large_matmuls() == {}
    monkeypatch.setattr(compiler_options, "this_hosts_chip", lambda: CHIPS["v6e"])
    assert for_large_matmuls() == for_large_matmuls("v6e") == {VMEM: "98304"}
    for given, kib in (("", "98304"), (f"--{VMEM}=65536", "65536")):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
        add_to_environment(for_large_matmuls())
        add_to_environment()
        told = os.environ["LIBTPU_INIT_ARGS"]
        assert parse_arguments(told) == {**OPTIONS, VMEM: kib}
        assert refusal(told, library()) == Refusal()


def test_refused_by_the_installed_libtpu():
    known = " ".join(libtpu_flags.to_arguments(compiler_options.ON_SPARSE_CORES))
    assert refusal(known, library()) == Refusal()
    unknown = refusal("--xla_no_such=1 --noxla_other --xla_tpu_enable_flash_attention", library())
    assert unknown == Refusal(("xla_no_such", "noxla_other"))
    (said,) = refusal("--xla_tpu_enable_flash_attention=perhaps", library()).illegal
    assert "Illegal value 'perhaps'" in said
    assert refusal("--flagfile=/no/such/file", library()).illegal
    assert refusal("--xla_no_such", "/no/libtpu.so") == refusal("--xla_no_such", None) == Refusal()
    kept = with_undefok("--undefok=a,b --xla_x=1 -- --undefok=c", ["xla_x", "b"])
    assert kept == "--undefok=a,b,xla_x --xla_x=1 -- --undefok=c"
