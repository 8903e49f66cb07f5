"""Trains a small network on handwritten digits, fully sharded over the ranks.

    python examples/train_mnist.py                        # 4 ranks on the CPU of any machine
    python examples/train_mnist.py --num_devices=2        # 2 ranks
    PJRT_DEVICE=TPU python examples/train_mnist.py \\
        --datadir=/tmp/mnist                          # MNIST on a v3-8: all 8 cores
    python examples/train_mnist.py --plan=v3-8            # what that would need, without a TPU

Each rank trains on its part of every batch and keeps a part of every parameter. After every epoch
all ranks save a checkpoint, from which --resume goes on, on as many ranks as you like. At the end
the command line tool joins the last one into one model, and plain torch, without torch_xla, loads
that into the unwrapped network and evaluates it again: the accuracies must agree.

The data are scikit-learn's bundled digits; with --datadir it is MNIST, which is downloaded there if
need be. By default layers are wrapped one by one (nested) and checkpointed, and a smaller last
batch is dropped (its batch statistics are poor): --nouse_nested_fsdp, --nodrop_last and
--nouse_gradient_checkpointing turn that off. --help lists all flags.
"""

import copy
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, fitting, mnist_data, script, sharing, wrapping
from common.mnist_network import MnistNetwork
from common.planned import launch_or_plan
from torch import nn

flags.DEFINE_integer("batch_size", 16, "images a rank and step", lower_bound=1)
flags.DEFINE_integer(
    "num_epochs", None, "default: 12 for the bundled digits, 2 for MNIST", lower_bound=1
)
flags.DEFINE_float(
    "lr", None, "learning rate a rank; default: 0.02 for the bundled digits, 0.01 for MNIST"
)
flags.DEFINE_float("momentum", 0.5, "momentum of SGD")
flags.DEFINE_bool("drop_last", True, "leave out the last batch of an epoch if it is smaller")
flags.DEFINE_string(
    "ckpt_prefix",
    "runs/mnist/ckpt",
    "folder of the checkpoints, on a disk that all hosts share",
)
flags.DEFINE_bool("fake_data", False, "train on random images")
flags.DEFINE_string("datadir", None, "MNIST in torchvision's layout, downloaded if need be")
script.require("datadir", bool, "is empty; name a folder")
flags.FLAGS.set_default("use_gradient_checkpointing", True)
flags.FLAGS.set_default("auto_wrap_min_num_params", 1000)
script.require("lr", lambda value: 0 < value < float("inf"), "must be greater than 0")
script.require("momentum", lambda value: 0 <= value < 1, "must be at least 0 and less than 1")


def main(options: SimpleNamespace) -> None:
    wrapping.settle(options)
    if options.fake_data and options.datadir:
        raise script.Stop("--fake_data excludes --datadir", code=2)
    lr, num_epochs = (0.01, 2) if options.datadir else (0.02, 12)
    script.fill_in(options, lr=lr, num_epochs=num_epochs)
    if not options.plan:
        checkpoints.prepare_folder(options, "ckpt_prefix")
    if options.datadir:
        mnist_data.prepare(options.datadir)

    torch.manual_seed(options.seed)
    network = MnistNetwork()
    launch_or_plan(train, (options, network), options, options.num_devices, "MNIST network")


def train(index: int, options: SimpleNamespace, network: nn.Module) -> None:
    """What each rank runs. ``network`` has the same initial values everywhere."""
    # Not at the top of the file: launch has to set up the runtime before.
    import torch_xla
    import torch_xla.runtime as xr

    share = (xr.global_ordinal(), xr.world_size(), options.batch_size)
    train_data = mnist_data.load(True, options.datadir, options.fake_data)
    test_data = mnist_data.load(False, options.datadir, options.fake_data)
    batches = sharing.training_batches(
        train_data,
        *share,
        seed=options.seed,
        drop_last=options.drop_last,
        max_steps=options.max_steps,
    )

    # Ranks may be threads that were handed the same network.
    model = wrapping.shard(
        copy.deepcopy(network),
        options,
        torch_xla.device(),
        blocks={nn.Conv2d, nn.Linear},
        children=("conv1", "conv2", "fc1", "fc2"),
    )
    # The wrapper has reduced the gradients when backward returns: call optimizer.step() directly.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * xr.world_size(), momentum=options.momentum
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    folder = options.datadir and os.path.abspath(options.datadir)
    task = fitting.Task(
        "MNIST network, fully sharded",
        model,
        optimizer,
        None,
        step,
        batches,
        sharing.test_batches(test_data, *share),
        len(test_data),
        network={"kind": "mnist"},
        description={"kind": "mnist", "datadir": folder, "fake": options.fake_data},
        exact=options.compute_dtype == "float32",
    )
    fitting.fit(task, options, options.ckpt_prefix, options.num_epochs)


if __name__ == "__main__":
    script.run(main)
