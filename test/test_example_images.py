"""The scripts that train on folders of images, run the way a user runs them."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES
from example_runs import table
from safetensors.torch import load_file

pytestmark = pytest.mark.full

FAKE = ("--fake_data", "--num_classes=10", "--max_steps=2", "--num_devices=2")
SMALL = (*FAKE, "--image_size=32", "--batch_size=4", "--num_epochs=1")
SMALL_RESNET = (*SMALL, "--test_set_batch_size=4")
SMALL_VIT = (
    *SMALL, "--patch_size=8", "--embed_dim=32", "--num_heads=2", "--num_blocks=3",
    "--warmup_steps=2", "--compute_dtype=float32",
)  # fmt: skip


@pytest.fixture
def run(run_example):
    return run_example


def refusal(done, *parts):
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("epoch ")]
    assert len(lines) == 1, done.stderr
    assert all(part in lines[0] for part in parts), lines[0]


class TestImageNet:
    def test_learns_real_images_from_folders_on_4_ranks(self, run, tmp_path):
        # Optimized a little: the suite's own setting makes convolutions several times slower. And
        # without the pass that swaps images with kernels larger than they are: XLA:CPU computes
        # what comes of it in plain loops, twenty times slower.
        quick = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")
        quick += " --xla_disable_hlo_passes=algsimp"
        flags = ("--num_epochs=3", "--num_warmup_epochs=0.5", "--target_accuracy=75")
        rows = table(run("train_imagenet.py", *flags, "--logdir=curves", XLA_FLAGS=quick))
        assert rows["ranks"] == "4" and rows["parameters"] == "11,181,642"
        assert rows["agree"] == "yes"
        assert float(rows["accuracy, sharded"].split("%")[0]) >= 75
        for part, count in (("train", 1500), ("val", 297)):
            assert len(list((tmp_path / "runs/digits" / part).glob("*/*.png"))) == count
        assert list((tmp_path / "curves").iterdir())
        # What the table says can be had again, in plain torch.
        done = run("evaluate.py", "runs/imagenet/ckpt_consolidated", "--batch_size=50")
        assert f"{json.loads(done.stdout)['accuracy']:.2%}" in rows["accuracy, plain torch"]
        described = (tmp_path / "runs/imagenet/ckpt_consolidated/network.json").read_text()
        assert json.loads(described)["images"]["datadir"] == str(tmp_path / "runs/digits")

    def test_every_option_at_once_then_resumes_elsewhere_and_refuses_what_differs(self, run):
        flags = (
            "--model=resnet18", "--sync_batch_norm", "--use_gradient_checkpointing",
            "--auto_wrap_policy=type_based", "--label_smoothing=0.1", "--clip_grad_norm=1",
            "--lr_scheduler_type=cosine", "--optimizer=adamw", "--no_ckpt_consolidation",
            "--shard_param_on_dim_0",
        )  # fmt: skip
        rows = table(run("train_imagenet.py", *SMALL_RESNET, *flags))
        assert rows["checkpoint"] == "runs/imagenet/ckpt/step-00000001"
        again = (*SMALL_RESNET, "--num_epochs=2", "--resume")
        done = run("train_imagenet.py", *again, *flags, "--num_devices=3")
        assert table(done)["checkpoint"].endswith("step-00000002") and "epoch 1" not in done.stderr
        for more, words in (
            ((*again, "--num_epochs=3", "--model=squeezenet1_1"), "layer"),
            (SMALL, "--resume, or another --ckpt_dir"),
        ):
            refusal(run("train_imagenet.py", *more), words)

    def test_reads_images_in_processes_and_resumes_bit_for_bit(self, run, common, tmp_path):
        common.digits.write(str(tmp_path / "images"))
        flags = ("--datadir=images", "--image_size=32", "--model=squeezenet1_1", "--num_devices=2")
        flags += ("--batch_size=4", "--max_steps=2")
        rows = table(run("train_imagenet.py", *flags, "--num_workers=2", "--num_epochs=1"))
        assert rows["agree"] == "yes"
        flags += ("--num_epochs=2", "--no_ckpt_consolidation")
        resumed = table(run("train_imagenet.py", *flags, "--num_workers=0", "--resume"))
        # Not evaluated after its first epoch, which must make no difference.
        flags += ("--eval_interval=2", "--num_workers=1", "--ckpt_dir=straight")
        straight = table(run("train_imagenet.py", *flags))
        assert straight["final training loss"] == resumed["final training loss"]
        for rank in range(2):
            one, other = (
                load_file(tmp_path / rows["checkpoint"] / f"rank-0000{rank}-of-00002.safetensors")
                for rows in (resumed, straight)
            )
            assert one.keys() == other.keys()
            assert [name for name in one if not one[name].equal(other[name])] == []

    def test_wrong_inputs_end_in_one_line(self, refused, common):
        # So many classes that a ResNet-18 fits into half of the memory, and its training does not.
        too_many = common.networks.memory_of_the_machine() // 8 // 513
        refused(
            "train_imagenet",
            (["--datadir=nothing"], "no folder nothing/train"),
            (["--model=resnet51"], "resnet50"),
            (["--lr=nan"], "--lr=nan: must be finite"),
            (["--ckpt_dir=/proc/nothing"], "--ckpt_dir=/proc/nothing"),
            (["--ckpt_dir=ftpx://x/y"], "--ckpt_dir=ftpx://x/y"),
            (["--model=a detector"], "such as resnet50, vit_b_16; torchvision.models.list_models"),
            (["--seed=9223372036854775807"], "--seed=9223372036854775807"),
            (["--resume", "--resume_epoch=1"], "give only one: --resume takes the latest"),
            (["--resume_epoch=7"], "no complete checkpoint of --resume_epoch=7"),
            (["--plan_report=x.json"], "--plan_report needs --plan"),
            (["--datadir="], "--datadir=: is empty"),
            (["--ckpt_dir="], "--ckpt_dir is empty"),
            (["--model=alexnet"], "--image_size=16"),
            (["--batch_size=1"], "on batches of 1"),
            (["--num_warmup_epochs=1e308"], "--num_warmup_epochs=1e+308: must be from 0 to"),
            (["--num_classes=1000000000000", "--model=regnet_y_400mf"], "model or --num_classes"),
            ([f"--num_classes={too_many}"], "smaller --model or --num_classes, or use a TPU"),
            (["--num_classes=1" + 20 * "0"], "--num_classes=100000000000000000000: "),
            (["--plan=v3-8", "--plan_report=no/a.json"], "--plan_report=no/a.json: "),
            (["--compilation_cache= "], "--compilation_cache= : is blank; name a folder"),
        )

    def test_every_model_of_torchvision_has_working_defaults(self, run_script):
        done = run_script(
            "import sys; sys.path.insert(0, sys.argv[1]); del sys.argv[1]\n"
            "from types import SimpleNamespace\n"
            "from absl import flags\n"
            "import train_imagenet as script\n"
            "flags.FLAGS(sys.argv)\n"
            "for model in script.networks.models.list_models(module=script.networks.models):\n"
            "    options = SimpleNamespace(**flags.FLAGS.flag_values_dict())\n"
            "    options.model = model\n"
            "    script.set_defaults(options, script.Source(None, None, 1000, digits=False))\n"
            "    print(model, options.optimizer, options.lr)\n",
            EXAMPLES,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) > 70
        assert {"resnet50 sgd 0.4", "vgg16 sgd 0.04", "vit_b_16 adamw 0.001"} <= set(lines)


class TestVisionTransformer:
    def test_the_published_sizes(self, common):
        def count(*sizes):
            with torch.device("meta"):
                model = common.networks.VisionTransformer(*sizes[:3], 1, sizes[3])
            return sum(parameter.numel() for parameter in model.parameters())

        assert count(224, 14, 5120, 32) == 10_077_917_160
        block = count(224, 14, 5120, 2) - count(224, 14, 5120, 1)
        assert block == 314_639_360
        # The flags that the script's docstring gives for 60 billion.
        assert count(224, 14, 10240, 48) == 60_423_281_640

    def test_trains_and_resumes_with_blocks_in_a_loop_or_one_by_one(self, run, common, tmp_path):
        flags = (*SMALL_VIT, "--ckpt_epoch_interval=1")
        first = run("train_vit.py", *flags, "--mlp_dropout=0.1")
        parameters = table(first)["parameters"]
        assert f"vision transformer, {parameters} parameters" in first.stdout
        # Trained on fake images, it can be evaluated on real ones.
        folder = "runs/vit/ckpt_consolidated"
        hint = table(first)["in plain torch"]
        assert hint == f"python examples/evaluate.py {folder} --datadir=DIR"
        _, described = common.evaluate.load(str(tmp_path / folder))
        digits = common.digits.write(str(tmp_path / "digits"))
        assert len(common.evaluate.test_images(described["images"], digits)) == 297
        more = ("--num_epochs=2", "--resume_epoch=1", "--noscan_blocks")
        second = run("train_vit.py", *flags, *more)
        assert table(second)["checkpoint"].endswith("step-00000002")

    def test_wide_options(self, run):
        flags = ("--no_grad_ckpt", "--no_reshard_after_forward", "--flatten_parameters")
        dropouts = ("--pos_dropout=0.1", "--att_dropout=0.1", "--noshard_on_cpu")
        table(run("train_vit.py", *SMALL_VIT, *flags, *dropouts, "--compute_dtype=bfloat16"))

    def test_without_fsdp_it_is_the_same_training(self, run):
        flags = (*SMALL_VIT, "--seed=3", "--no_ckpt_consolidation")
        sharded = table(run("train_vit.py", *flags, "--noscan_blocks"))
        whole = run("train_vit.py", *flags, "--run_without_fsdp", "--ckpt_dir=whole")
        assert table(whole)["final training loss"] == sharded["final training loss"]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_damaged_image_is_named(self, run, common, tmp_path, workers):
        folder = common.digits.write(str(tmp_path / "images"))
        damaged = sorted(Path(folder, "train", "3").iterdir())[0]
        damaged.write_bytes(damaged.read_bytes()[:100])
        flags = [flag for flag in SMALL_VIT if flag not in ("--fake_data", "--max_steps=2")]
        flags += ["--datadir=images", f"--num_workers={workers}", "--batch_size=100"]
        refusal(run("train_vit.py", *flags), damaged.name, "is not a complete image")

    def test_is_planned(self, run, tmp_path):
        flags = ("--embed_dim=64", "--num_heads=2", "--num_blocks=2", "--batch_size=16")
        done = run("train_vit.py", "--plan=v3-8", *flags, "--plan_report=plan.json")
        assert done.returncode == 0, done.stderr
        assert "FITS" in done.stdout and (tmp_path / "plan.json").exists()
        assert not (tmp_path / "runs").exists()

    def test_wrong_inputs_end_in_one_line(self, refused):
        refused(
            "train_vit",
            (["--embed_dim=30", "--num_heads=4"], "--embed_dim=30 is not a multiple"),
            (["--image_size=30", "--patch_size=4"], "--image_size=30 is not a multiple"),
            (["--settings=x", "--no_grad_ckpt"], "--settings excludes --no_grad_ckpt"),
            (["--tune=v3-8", "--plan=v3-8"], "--tune excludes --plan"),
            (["--tune_batch=4"], "--tune_batch needs --tune"),
            (["--tune=v3-8", "--tune_batch=4,x"], "must be numbers from 1 on"),
            (["--fake_data", "--datadir=x"], "--fake_data excludes"),
            (["--mlp_ratio=1e308"], "--mlp_ratio=1e+308, --num_classes=10: too large for a tensor"),
            (["--scan_blocks", "--noshard_on_cpu"], "--scan_blocks excludes --noshard_on_cpu"),
            (["--embed_dim=1048576"], "GiB: choose a smaller --embed_dim or --num_blocks"),
            (["--batch_size=30"], "--batch_size=30 must be a multiple of the number of ranks, 4"),
        )


def test_damaged_digits_end_in_one_line(refused, tmp_path):
    (tmp_path / "runs/digits/val/3").mkdir(parents=True)
    missing, remedy = "no folder runs/digits/train; ", "; remove runs/digits, which is then created"
    refused("train_imagenet", ([], missing), ([], remedy))


class TestEvaluation:
    def test_needs_a_model(self, run):
        refusal(run("evaluate.py"), "give one folder")
        refusal(run("evaluate.py", "nothing"), "nothing has no consolidated model")

    def test_needs_to_know_the_images(self, common, tmp_path):
        folders = {"kind": "folders", "datadir": None, "classes": None, "image_size": 16}
        nowhere = str(tmp_path / "nowhere")
        for images, datadir, words in (
            (folders, None, "give real ones with --datadir=DIR"),
            (folders, nowhere, "are expected in [^ ]*/nowhere/val/<class>/'"),
            ({"kind": "mnist", "datadir": None, "fake": True}, nowhere, f"no MNIST in .*{nowhere}"),
        ):
            with pytest.raises(common.script.Stop, match=words) as stop:
                common.evaluate.test_images(images, datadir)
            assert stop.value.code == 2 and "\n" not in stop.value.message
        digits = Path(common.digits.write(str(tmp_path / "digits")))
        # Nothing is trained: images to train on need not be there.
        (digits / "train").rename(tmp_path / "elsewhere")
        assert len(common.evaluate.test_images(folders, str(digits))) == 297


class TestFolders:
    def test_what_is_wrong_is_named(self, common, tmp_path):
        folders, stop = common.images, common.script.Stop
        with pytest.raises(stop, match="no folder .*train; images are expected"):
            folders.find_classes(str(tmp_path))
        (tmp_path / "train").mkdir()
        (tmp_path / "val/cat").mkdir(parents=True)
        with pytest.raises(stop, match="train is empty"):
            folders.find_classes(str(tmp_path))
        (tmp_path / "train/dog").mkdir()
        with pytest.raises(stop, match="same classes: 2 classes are in only one .*, such as 'cat'"):
            folders.find_classes(str(tmp_path))
        (tmp_path / "train/cat").mkdir()
        (tmp_path / "val/dog").mkdir()
        assert folders.find_classes(str(tmp_path)) == ["cat", "dog"]
        with pytest.raises(stop, match="Found no valid file for the classes"):
            folders.training_images(str(tmp_path))
        with pytest.raises(stop, match="have the 2 classes .* trained on: 2 .*, such as 'cat'"):
            folders.test_images(str(tmp_path), ["cow", "dog"], image_size=16)

    def test_a_folder_that_can_not_be_read_is_named(self, common, tmp_path, monkeypatch):
        for part in ("train", "val"):
            (tmp_path / part / "cat").mkdir(parents=True)

        def refuse(path):  # root, as whom tests may run, can read all
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        for name in ("scandir", "listdir"):
            monkeypatch.setattr(common.images.os, name, refuse)
        words = "cannot be read: Permission denied; make it readable"
        with pytest.raises(common.script.Stop, match=f"train {words}") as stop:
            common.images.find_classes(str(tmp_path))
        assert stop.value.code == 2
        with pytest.raises(common.script.Stop, match=words):
            common.digits.write(str(tmp_path))

    def test_the_digits_are_written_once(self, common, tmp_path):
        (tmp_path / "new/digits").mkdir(parents=True)  # empty: as if there were none
        folder = common.digits.write(str(tmp_path / "new/digits"))
        assert os.listdir(tmp_path / "new") == ["digits"]
        before = (tmp_path / "new/digits").stat().st_mtime_ns
        assert common.digits.write(folder) == folder
        assert (tmp_path / "new/digits").stat().st_mtime_ns == before
        images = common.images.test_images(folder, image_size=16, border=1.0)
        image, label = images[0]
        assert len(images) == 297 and image.shape == (3, 16, 16) and label == 0


@pytest.mark.parametrize(
    "logdir, words",
    [("/proc/nothing", "No such file"), ("a\0b", "null byte"), ("ftpx://a/b", "not known: ftpx")],
)
def test_curves_that_can_not_be_written_are_refused(common, monkeypatch, logdir, words):
    monkeypatch.setattr("torch_xla.runtime.world_size", lambda: 1)
    monkeypatch.setattr("torch_xla.runtime.global_ordinal", lambda: 0)
    options = SimpleNamespace(plan=None, logdir=logdir, profile_steps=None)
    batches = torch.utils.data.DataLoader(range(1))
    with pytest.raises(common.script.Stop, match=words) as stop:
        common.meters.Meters(options, batches, batches)
    assert stop.value.code == 2 and stop.value.message.startswith(f"--logdir={logdir}: ")
