"""The MNIST example, run the way a user runs it."""

import os
import re
import shutil
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES
from example_runs import curve, table

from xla_fsdp.consolidate.format.reader import ShardedCheckpoint


@pytest.fixture
def example(common):
    return common.train_mnist


@pytest.fixture
def train(run_example):
    return partial(run_example, "train_mnist.py")


@pytest.mark.slow
def test_trains_saves_consolidates_and_agrees(train, tmp_path):
    flags = ("--num_devices=2", f"--compilation_cache={tmp_path / 'cache'}")
    done = train(*flags, "--num_epochs=2", "--logdir=curves")
    rows = table(done)
    assert rows["epochs"] == "2" and rows["ranks"] == "2" and rows["parameters"] == "21,900"
    assert float(rows["final training loss"]) < 0.5
    assert rows["agree"] == "yes"
    assert float(rows["accuracy, sharded"].split("%")[0]) > 90
    assert re.match(r"\d+ compiled, 0 from the cache in", rows["programs"])
    # Not a terminal: no bar, a line an epoch.
    epochs = re.findall(r"^epoch \d: loss .* samples/s, host .* GiB$", done.stderr, re.MULTILINE)
    assert len(epochs) == 2
    assert "\x1b" not in done.stderr + done.stdout and "\r" not in done.stderr
    assert rows["checkpoint"] == "runs/mnist/ckpt/step-00000002"
    folders = sorted(path.name for path in (tmp_path / "runs/mnist").iterdir())
    assert folders == ["ckpt", "ckpt_consolidated"]
    manifest = ShardedCheckpoint(tmp_path / "runs/mnist/ckpt").manifest
    assert manifest.step == manifest.world_size == 2 and manifest.optimizer.kind == "SGD"
    assert list((tmp_path / "curves").iterdir())
    again = table(train(*flags, "--num_epochs=2", "--ckpt_prefix=again"))
    assert re.match(r"0 compiled, [1-9]\d* from the cache in", again["programs"])
    assert again["final training loss"] == rows["final training loss"]


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(train, example, tmp_path):
    first = ("--num_devices=2", "--num_epochs=1", "--fake_data", "--max_steps=4")
    table(train(*first))
    again = train(*first)
    assert again.returncode == 2 and "exists from an earlier run; give --resume" in again.stderr
    done = train(
        "--num_devices=3", "--num_epochs=2", "--fake_data", "--max_steps=4", "--resume",
        "--lr=0.03", "--logdir=curves", "--log_steps=1",
    )  # fmt: skip
    assert table(done)["checkpoint"] == "runs/mnist/ckpt/step-00000002"
    # The rate of these flags, times these ranks; not the checkpoint's.
    rates = curve(tmp_path / "curves", "train/learning_rate")
    assert rates == {step: pytest.approx(0.09) for step in (5, 6, 7, 8)}
    assert done.stderr.count("epoch 2") == 1 and "epoch 1" not in done.stderr
    # Ended after its last checkpoint, as if before the rest of it: that is all that is done.
    shutil.rmtree(tmp_path / "runs/mnist/ckpt_consolidated")
    rest = train("--num_devices=1", "--num_epochs=2", "--fake_data", "--max_steps=4", "--resume")
    assert "step-00000002 is the last epoch's: nothing is left to train" in rest.stdout
    assert table(rest)["agree"] == "yes" and "epoch 2" not in rest.stderr
    assert "final training loss" not in table(rest)

    # A damaged newest checkpoint is named, with the one to go on from.
    prepare = example.checkpoints.prepare_folder
    folder = tmp_path / "runs/mnist/ckpt"
    os.truncate(folder / "step-00000002/rank-00001-of-00003.safetensors", 100)
    with pytest.raises(example.script.Stop, match="rank-00001.*; --resume_epoch=N resumes") as stop:
        prepare(SimpleNamespace(plan=None, ckpt_dir=str(folder), resume=True, resume_epoch=0))
    assert stop.value.code == 2
    prepare(SimpleNamespace(plan=None, ckpt_dir=str(folder), resume=False, resume_epoch=1))


def write_idx(path, array):
    """MNIST's format: two zero bytes, the type (8: unsigned byte), dimensions, sizes, data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">BBBB{array.dim()}I", 0, 0, 8, array.dim(), *array.shape)
    path.write_bytes(header + array.to(torch.uint8).numpy().tobytes())


@pytest.mark.full
def test_trains_on_files_in_the_format_of_mnist(train, tmp_path, example):
    raw = tmp_path / "data/MNIST/raw"
    for name, is_train, count in (("train", True, 160), ("t10k", False, 101)):
        digits = example.digits.load(is_train)
        write_idx(raw / f"{name}-images-idx3-ubyte", digits.images[:count])
        write_idx(raw / f"{name}-labels-idx1-ubyte", digits.labels[:count])
    how = (
        "--ckpt_prefix=here", "--auto_wrap_policy=size_based", "--flatten_parameters",
        "--compute_dtype=bfloat16", "--fp32_reduce_scatter", "--nouse_gradient_checkpointing",
        # Batches of a rank: two, and a smaller one.
        "--batch_size=30", "--nodrop_last",
    )  # fmt: skip
    rows = table(train("--datadir=data", "--num_devices=2", *how))
    assert rows["epochs"] == "2"  # the default for MNIST
    assert rows["accuracy, plain torch"].endswith("of 101)")
    assert rows["agree"] == "yes"
    assert rows["checkpoint"] == "here/step-00000002"


@pytest.mark.slow
def test_wrong_inputs_end_in_one_line(refused):
    assert not refused(
        "train_mnist",
        (["--batch_size=0"], "--batch_size=0"),
        (["--num_devices=9"], "--num_devices=9"),
        (["--compute_dtype=int8"], "<float32|float16|bfloat16>"),
        (["--lr=0"], "greater than 0"),
        (["--use_nested_fsdp", "--auto_wrap_policy=type_based"], "--use_nested_fsdp excludes"),
        (["--datadir=nothing"], "expected train-images-idx3-ubyte, "),
        (["--compilation_cache=/dev/null"], "/dev/null: compiled programs cannot be kept in"),
        (["--num_devices=2", "--batch_size=1000"], "choose a smaller --batch_size"),
    )


@pytest.mark.parametrize(
    "device, count, words",
    [
        ("GPU", "1", "PJRT_DEVICE=GPU is not supported; set it to TPU or CPU"),
        ("CPU", "abc", "CPU_NUM_DEVICES.*abc"),
    ],
)
def test_ranks_that_can_not_be_had_are_refused(example, monkeypatch, device, count, words):
    monkeypatch.setenv("PJRT_DEVICE", device)
    monkeypatch.setenv("CPU_NUM_DEVICES", count)
    monkeypatch.setattr("xla_fsdp.xlac.runtime_has_started", lambda: False)  # by another test
    options = SimpleNamespace(plan=None, num_devices=None)
    options.compilation_cache, options.profile_steps = "none", None
    with pytest.raises(example.script.Stop, match=words) as stop:
        example.tuning.launch_or_plan(print, (options,), "")
    assert stop.value.code == 2 and "\n" not in stop.value.message


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda raw, name: damage(raw / name[0], 2, 99), "a file is damaged"),
        (lambda raw, name: damage(raw / name[0], 2, 9), "int8"),
        (lambda raw, name: write_idx(raw / name[0], torch.zeros(5, 14, 14)), "each 28 x 28 image"),
        (lambda raw, name: write_idx(raw / name[1], torch.zeros(4)), "each 28 x 28 image"),
        (lambda raw, name: write_idx(raw / name[1], torch.full((5,), 10)), "from 0 to 9"),
    ],
    ids=["no type", "other type", "size", "count", "label"],
)
def test_damaged_files_of_mnist_are_refused(example, tmp_path, spoil, words):
    raw, names = tmp_path / "MNIST/raw", example.digits.MNIST_FILES
    for images, labels in (names[:2], names[2:]):
        write_idx(raw / images, torch.zeros(5, 28, 28))
        write_idx(raw / labels, torch.zeros(5))
    assert len(example.digits.load(False, str(tmp_path))) == 5
    spoil(raw, names[2:])
    with pytest.raises(example.script.Stop, match=words) as stop:
        example.digits.load(False, str(tmp_path))
    assert stop.value.code == 2 and "\n" not in stop.value.message


def damage(path, place, byte):
    content = bytearray(path.read_bytes())
    content[place] = byte
    path.write_bytes(content)


def test_disagreement_is_an_error(example, monkeypatch, capsys, tmp_path):
    from common import closing, script

    again = {"correct": 88, "images": 100, "accuracy": 0.88}
    monkeypatch.setattr(closing, "evaluate_in_plain_torch", lambda folder: again)
    monkeypatch.setattr(closing, "count_parameters", lambda saved: 10)
    options = SimpleNamespace(compilation_cache="none")
    meters = example.Meters.__new__(example.Meters)  # without ranks
    how = {"world_size": 1, "length": 1, "loss": 0.1, "seconds": 1.0, "speed": 100.0}
    vars(meters).update(how, correct=90, images=100, samples=100)
    (tmp_path / "weights").mkdir()
    closing.describe(str(tmp_path), {"kind": "mnist"}, {"kind": "mnist"})
    with pytest.raises(script.Stop, match="got 90 of 100 right") as stop:
        closing.summarize("MNIST", options, meters, "saved", str(tmp_path))
    assert stop.value.code == 1
    assert re.search(r"│ agree +│ no", capsys.readouterr().out)


def test_resuming_asks_for_the_same_network(example, monkeypatch):
    checkpoints, network = example.checkpoints, {"kind": "vit", "num_heads": 4}
    options = SimpleNamespace(
        plan=None, resume=True, resume_epoch=0, num_epochs=2, ckpt_dir="folder"
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    state = checkpoints.TrainingState(None, optimizer, None, network)
    resume = partial(checkpoints.resume, options, state, [None] * 10)

    def found(extra, step=1):
        loaded = SimpleNamespace(path="folder/it", step=step, extra=extra)
        monkeypatch.setattr(checkpoints.xla_fsdp, "load_checkpoint", lambda *_, **__: loaded)

    # Of before networks were saved, or of this one.
    for extra in (None, {"network": dict(network)}):
        found(extra)
        assert resume() == (1, "folder/it")
    found({"network": network | {"num_heads": 2}})
    with pytest.raises(example.script.Stop, match="folder/it .* num_heads is 2, not 4"):
        resume()
    found({"network": network}, step=3)
    with pytest.raises(example.script.Stop, match="nothing to train up to 2"):
        resume()

    def fails(*_, **__):
        raise checkpoints.CheckpointError("rank 0 could not read the checkpoint: OfAKind: a: is b")

    monkeypatch.setattr(checkpoints.xla_fsdp, "load_checkpoint", fails)
    with pytest.raises(example.script.Stop) as stop:
        resume()
    assert (stop.value.message, stop.value.code) == ("a: is b", 2)


def test_few_steps_see_all_classes(example):
    """Images in folders are sorted by class."""
    images = torch.zeros(1000, 28, 28, dtype=torch.uint8)
    data = example.digits.Images(images, torch.arange(1000) // 100)
    shares = [example.training_batches(data, rank, 2, 20, seed=1, max_steps=2) for rank in range(2)]
    labels = torch.cat([labels for loader in shares for _, labels in loader])
    assert len(labels) == 80 and len(set(labels.tolist())) == 10


def test_help_lists_the_shared_flags_but_none_of_absl(example):
    example.script.list_flags("the program")
    told = example.flags.FLAGS.module_help("the program")
    for flag in ("resume_epoch", "compilation_cache", "plan", "use_nested_fsdp"):
        assert re.search(rf"^ +--(\[no\])?{flag}: ", told, re.MULTILINE), flag
    assert "only_check_args" not in told


@pytest.mark.full
@pytest.mark.parametrize(
    "script, flags, network",
    [
        ("train_mnist.py", (), "MnistNetwork("),
        ("train_imagenet.py", ("--fake_data", "--model=resnet18"), "'model': 'resnet18', "),
        ("train_vit.py", ("--fake_data",), "'num_blocks': 32, "),
    ],
)
def test_ranks_can_be_processes_of_their_own(run_script, tmp_path, script, flags, network):
    """As on TPU: what a rank gets must survive the way into a spawned process."""
    done = run_script(
        "import runpy, sys, multiprocessing as mp\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "import xla_fsdp\n"
        "def launch(fn, args, num_devices):\n"
        "    with ProcessPoolExecutor(1, mp_context=mp.get_context('spawn')) as pool:\n"
        "        print(pool.submit(eval, 'repr((fn, args))', {'fn': fn, 'args': args}).result())\n"
        "xla_fsdp.launch = launch\n"
        "del sys.argv[0]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        EXAMPLES / script,
        "--batch_size=8",
        *flags,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    fn_and_options = re.search(r"^\(<function train .*batch_size=8, ", done.stdout, re.MULTILINE)
    assert fn_and_options and network in done.stdout, done.stdout
