"""Trains a small network on handwritten digits, fully sharded over the ranks.

    python examples/train_mnist.py                        # 4 ranks on the CPU of any machine
    python examples/train_mnist.py --num_devices=2        # 2 ranks
    PJRT_DEVICE=TPU python examples/train_mnist.py \\
        --datadir=/tmp/mnist                          # MNIST on a v3-8: all 8 cores
    python examples/train_mnist.py --plan=v3-8            # what that would need, without a TPU

Each rank trains on its part of every batch and keeps a part of every parameter. After every epoch
all ranks save a checkpoint, from which --resume goes on, on as many ranks as you like. At the end
the command line tool joins the last one into one file, and plain torch, without torch_xla, loads
that file into the unwrapped network and evaluates it again: the accuracies must agree.

The data are scikit-learn's bundled digits; with --datadir it is MNIST, which is downloaded there if
need be. By default layers are wrapped one by one (nested) and checkpointed, and a smaller last
batch is dropped (its batch statistics are poor): --nouse_nested_fsdp, --nodrop_last and
--nouse_gradient_checkpointing turn that off. --help lists all flags.
"""

import copy
import json
import os
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, mnist_data, script
from common.mnist_network import MnistNetwork
from common.planned import launch_or_plan
from common.progress import TrainingProgress, print_table
from torch import nn

import xla_fsdp

flags.DEFINE_integer("batch_size", 16, "images a rank and step", lower_bound=1)
flags.DEFINE_integer(
    "num_epochs", None, "default: 12 for the bundled digits, 2 for MNIST", lower_bound=1
)
flags.DEFINE_float(
    "lr", None, "learning rate a rank; default: 0.02 for the bundled digits, 0.01 for MNIST"
)
flags.DEFINE_float("momentum", 0.5, "momentum of SGD")
flags.DEFINE_bool("drop_last", True, "leave out the last batch of an epoch if it is smaller")
flags.DEFINE_integer("seed", 1, "seed of weights and shuffling", lower_bound=0)
flags.DEFINE_integer("num_devices", None, "ranks; default: 4 on CPU, all on TPU", 1, 8)
flags.DEFINE_bool(
    "use_nested_fsdp", None, "wrap layer by layer; default: unless --auto_wrap_policy is given"
)
flags.DEFINE_bool(
    "use_gradient_checkpointing", True, "recompute activations of wrapped layers in the backward"
)
flags.DEFINE_enum(
    "auto_wrap_policy", "none", ["none", "size_based", "type_based"], "which layers get wrapped"
)
flags.DEFINE_integer(
    "auto_wrap_min_num_params", 1000, "least size of a layer for size_based", lower_bound=1
)
flags.DEFINE_bool("flatten_parameters", False, "store each layer's parameters as one vector")
flags.DEFINE_enum(
    "compute_dtype",
    "float32",
    ["float32", "float16", "bfloat16"],
    "dtype to compute in; the narrow ones are slow on CPU",
)
flags.DEFINE_bool("fp32_reduce_scatter", False, "reduce gradients in float32")
flags.DEFINE_bool("shard_param_on_dim_0", False, "shard along dimension 0, keeping the shape")
flags.DEFINE_string(
    "ckpt_prefix",
    "runs/mnist/ckpt",
    "folder of the checkpoints, on a disk that all hosts share",
)
flags.DEFINE_bool("resume", False, "go on from the latest checkpoint, if there is one")
flags.DEFINE_bool("no_ckpt_consolidation", False, "leave it at the files of the ranks")
flags.DEFINE_bool("fake_data", False, "train on random images")
flags.DEFINE_string("datadir", None, "MNIST in torchvision's layout, downloaded if need be")
flags.DEFINE_string("logdir", None, "write TensorBoard curves there")
flags.DEFINE_integer("log_steps", 5, "steps between updates of the progress bar", lower_bound=1)
flags.DEFINE_integer("max_steps", None, "most steps an epoch, for a quick look", lower_bound=1)
script.require("lr", lambda value: 0 < value < float("inf"), "must be greater than 0")
script.require("momentum", lambda value: 0 <= value < 1, "must be at least 0 and less than 1")


def main(options: SimpleNamespace) -> None:
    if options.use_nested_fsdp is None:
        options.use_nested_fsdp = options.auto_wrap_policy == "none"
    if options.use_nested_fsdp and options.auto_wrap_policy != "none":
        raise script.Stop("--use_nested_fsdp excludes --auto_wrap_policy", code=2)
    if options.fake_data and options.datadir:
        raise script.Stop("--fake_data excludes --datadir", code=2)
    options.lr = options.lr or (0.01 if options.datadir else 0.02)
    options.num_epochs = options.num_epochs or (2 if options.datadir else 12)
    if not options.plan:
        checkpoints.prepare_folder(options.ckpt_prefix, options.resume)
    if options.datadir:
        mnist_data.prepare(options.datadir)

    torch.manual_seed(options.seed)
    network = MnistNetwork()
    launch_or_plan(train, (options, network), options, options.num_devices, "MNIST network")


def train(index: int, options: SimpleNamespace, network: nn.Module) -> None:
    """What each rank runs. ``network`` has the same initial values everywhere."""
    # Not at the top of the file: launch has to set up the runtime before.
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.runtime as xr

    rank, world_size, device = xr.global_ordinal(), xr.world_size(), torch_xla.device()
    train_data = mnist_data.load(True, options.datadir, options.fake_data)
    test_data = mnist_data.load(False, options.datadir, options.fake_data)
    if options.max_steps:
        train_data = train_data.first(options.max_steps * options.batch_size * world_size)
    batches = mnist_data.train_loader(
        train_data, rank, world_size, options.batch_size, options.drop_last, options.seed
    )
    if not len(batches):
        raise script.Stop(
            f"--drop_last leaves nothing of {len(train_data)} images over {world_size} ranks in "
            f"batches of {options.batch_size}; choose a smaller --batch_size",
            code=2,
        )
    train_loader = pl.MpDeviceLoader(batches, device)
    test_loader = pl.MpDeviceLoader(
        mnist_data.test_loader(test_data, rank, world_size, options.batch_size), device
    )

    # Ranks may be threads that were handed the same network.
    model = shard(copy.deepcopy(network), options, device)
    # The wrapper has reduced the gradients when backward returns: call optimizer.step() directly.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * world_size, momentum=options.momentum
    )

    images = min(len(batches.sampler), len(batches) * options.batch_size)  # a rank and epoch
    images_a_step = images * world_size / len(batches)
    show = rank == 0 and not options.plan
    done = 0
    if options.resume and not options.plan:
        done = checkpoints.resume(options.ckpt_prefix, model, optimizer, options.num_epochs)
    with TrainingProgress(show, len(batches), images_a_step, options.logdir) as progress:
        for epoch in range(done, options.num_epochs):
            batches.sampler.set_epoch(epoch)  # shuffles anew
            progress.start_epoch(epoch + 1)
            loss = train_epoch(model, optimizer, train_loader, progress, options.log_steps)
            progress.end_epoch()
            average_batch_statistics(model)
            correct = count_correct(model, test_loader)
            progress.report(loss, correct / len(test_data))
            saved = xla_fsdp.save_checkpoint(
                options.ckpt_prefix, model, optimizer, step=epoch + 1, keep_last=2
            )

    if rank == 0:
        summarize(options, world_size, progress, network, loss, correct, len(test_data), saved)


def train_epoch(model, optimizer, loader, progress: TrainingProgress, log_steps: int) -> float:
    """Trains on every batch of ``loader``; returns the mean loss of all ranks."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    model.train()
    total = torch.zeros((), device=torch_xla.device())
    # The loader calls torch_xla.sync() between batches, which runs the step traced so far.
    for step, (images, labels) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % log_steps == 0:
            # Called once the step has run: loss.item() here would cut the step in two.
            xm.add_step_closure(show, (progress, step, loss.detach()))
    return xm.mesh_reduce("loss", total.item(), sum) / step / xr.world_size()


def show(progress: TrainingProgress, step: int, loss: torch.Tensor) -> None:
    progress.update(step, loss.item())


def average_batch_statistics(model: nn.Module) -> None:
    """Makes every rank evaluate, and save, the same model: batch norm saw other images on each."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    xm.all_reduce(xm.REDUCE_SUM, statistics, scale=1 / xr.world_size())


@torch.no_grad()
def count_correct(model: nn.Module, loader) -> int:
    """How many of the held-out images, over all ranks, the model gets right."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=torch_xla.device())
    for images, labels in loader:
        correct += (model(images).argmax(dim=1) == labels).sum()
    return xm.mesh_reduce("correct", correct.item(), sum)


def shard(network: nn.Module, options: SimpleNamespace, device: torch.device) -> nn.Module:
    """Wraps ``network`` as the flags say."""
    policy = {
        "none": None,
        "size_based": partial(
            xla_fsdp.size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": partial(
            xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d, nn.Linear}
        ),
    }[options.auto_wrap_policy]
    fsdp = partial(
        xla_fsdp.XlaFullyShardedDataParallel,
        compute_dtype=getattr(torch, options.compute_dtype),
        fp32_reduce_scatter=options.fp32_reduce_scatter,
        flatten_parameters=options.flatten_parameters,
        shard_param_on_dim_0=options.shard_param_on_dim_0,
    )

    def wrap_layer(layer: nn.Module, **forwarded) -> nn.Module:
        if options.use_gradient_checkpointing:
            layer = xla_fsdp.checkpoint_module(layer)
        return fsdp(layer, **forwarded)

    network = network.to(device)
    if options.use_nested_fsdp:
        for name in ("conv1", "conv2", "fc1", "fc2"):
            setattr(network, name, wrap_layer(getattr(network, name)))
    return fsdp(network, auto_wrap_policy=policy, auto_wrapper_callable=wrap_layer)


def summarize(
    options: SimpleNamespace,
    world_size: int,
    progress: TrainingProgress,
    network: nn.Module,
    loss: float,
    correct: int,
    images: int,
    saved: str,
) -> None:
    """Prints the closing table, with the accuracy that plain torch gets from the saved model."""
    shards = sorted(name for name in os.listdir(saved) if name.startswith("rank-"))
    sizes = [os.path.getsize(os.path.join(saved, name)) for name in shards]
    rows = [
        ("epochs", f"{options.num_epochs}"),
        ("parameters", f"{sum(p.numel() for p in network.parameters()):,}"),
        ("ranks", f"{world_size}"),
        ("training time", f"{progress.seconds:.1f} s"),
        ("samples/s, last epoch", f"{progress.samples_per_second:,.0f}"),
        ("final training loss", f"{loss:.4f}"),
        ("checkpoint", saved),
        ("size, each rank", ", ".join(f"{size / 1024:,.0f} KiB" for size in sizes)),
        ("accuracy, sharded", f"{correct / images:.2%} ({correct} of {images})"),
    ]
    agree = True
    if not options.no_ckpt_consolidation:
        path = checkpoints.consolidate(saved, f"{options.ckpt_prefix}_consolidated.pth")
        again = evaluate_in_plain_torch(path, options)
        # A narrower dtype rounds otherwise than plain torch's float32.
        allowed = images // (2000 if options.compute_dtype == "float32" else 50)
        agree = abs(again["correct"] - correct) <= allowed
        rows += [
            ("consolidated file", f"{path} ({os.path.getsize(path) / 1024:,.0f} KiB)"),
            ("accuracy, plain torch", f"{again['accuracy']:.2%} ({again['correct']} of {images})"),
            ("agree", "yes" if agree else "no"),
        ]
    print_table("MNIST network, fully sharded", rows)
    if not agree:
        raise script.Stop(
            f"the sharded model got {correct} of {images} right, the consolidated one "
            f"{again['correct']}: the checkpoint is not the model that was trained"
        )


def evaluate_in_plain_torch(path: str, options: SimpleNamespace) -> dict:
    """Runs evaluate_mnist.py, a process without torch_xla, on a consolidated checkpoint."""
    folder = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, os.path.join(folder, "evaluate_mnist.py"), path]
    command += ["--datadir", options.datadir] if options.datadir else []
    command += ["--fake_data"] if options.fake_data else []
    return json.loads(checkpoints.run_command(command, "evaluation in plain torch"))


if __name__ == "__main__":
    script.run(main)
