"""Trains a small network on handwritten digits, fully sharded over the ranks.

    python examples/train_mnist.py                        # 4 ranks on the CPU of any machine
    python examples/train_mnist.py --num_devices=2        # 2 ranks
    PJRT_DEVICE=TPU python examples/train_mnist.py \\
        --datadir=/tmp/mnist                          # MNIST on a v3-8: all 8 cores
    python examples/train_mnist.py --plan=v3-8            # a plan for the same, without a TPU

Each rank trains on its part of every batch and has a shard of every parameter. After every epoch
all ranks save a checkpoint, from which --resume continues on any number of ranks. At the end the
command line tool joins the last checkpoint into one model. Plain torch, without torch_xla, loads
this model into the unwrapped network and evaluates it: the accuracies must agree.

The data are scikit-learn's bundled digits, or with --datadir MNIST, which is downloaded if it is
missing. By default layers are wrapped one by one (nested) and checkpointed, and a smaller last
batch is dropped (its batch statistics are poor). --nouse_nested_fsdp, --nodrop_last and
--nouse_gradient_checkpointing turn this off. --help lists all flags.
"""

import copy
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import digits
import torch
import torch.nn.functional as F
import wrapping
from absl import flags
from common import checkpoints, closing, evaluation, script, tuning
from common.batches import on_device
from common.meters import Meters
from sampling import test_batches, training_batches
from torch import nn
from torch.utils.data import DataLoader

import xla_fsdp

flags.DEFINE_integer("batch_size", 16, "images of a rank in a step", lower_bound=1)
flags.DEFINE_integer(
    "num_epochs", None, "default: 12 for the bundled digits, 2 for MNIST", lower_bound=1
)
script.DEFINE_number(
    "lr", None, "learning rate; default: 0.02 for the digits, 0.01 for MNIST", "(0, inf)"
)
script.DEFINE_number("momentum", 0.5, "momentum of SGD", "[0, 1)")
flags.DEFINE_bool("drop_last", True, "leave out the last batch of an epoch if it is smaller")
flags.DEFINE_string("ckpt_prefix", "runs/mnist/ckpt", "folder of the checkpoints, shared by all")
flags.DEFINE_bool("fake_data", False, "train on random images")
flags.DEFINE_string("datadir", None, "MNIST in torchvision's layout, downloaded if missing")
script.require("datadir", bool, "is empty; give a folder")
flags.FLAGS.set_default("use_gradient_checkpointing", True)
flags.FLAGS.set_default("auto_wrap_min_num_params", 1000)


class MnistNetwork(nn.Module):
    """Two convolutions, two linear layers; returns log-probabilities of the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def main(options: SimpleNamespace) -> None:
    wrapping.settle(options)
    tuning.settle(options, *wrapping.SHARDING)
    script.exclude(options, "fake_data", "datadir")
    lr, num_epochs = (0.01, 2) if options.datadir else (0.02, 12)
    script.fill_in(options, lr=lr, num_epochs=num_epochs)
    checkpoints.prepare_folder(options, "ckpt_prefix")
    if options.datadir:
        digits.prepare(options.datadir)

    torch.manual_seed(options.seed)
    network = MnistNetwork()
    tuning.launch_plan_or_tune(train, (options, network), "MNIST network")


def train(index: int, options: SimpleNamespace, network: nn.Module) -> None:
    """Trains ``network``, whose initial values are the same on all ranks; each rank runs this."""
    # Not at the top of the file: launch must set up the runtime first.
    import torch_xla
    import torch_xla.runtime as xr

    # Every rank reads another part of the data.
    share = (xr.global_ordinal(), xr.world_size(), options.batch_size)
    train_data = digits.load(True, options.datadir, options.fake_data)
    test_data = digits.load(False, options.datadir, options.fake_data)
    how = {"drop_last": options.drop_last, "max_steps": options.max_steps}
    batches = training_batches(train_data, *share, seed=options.seed, **how)
    held_out = test_batches(test_data, *share)

    model = copy.deepcopy(network)  # ranks may be threads, which share the argument
    model.to(torch_xla.device())
    layers = {nn.Conv2d, nn.Linear}
    policy = wrapping.policy(options, model, layers)
    fsdp = partial(xla_fsdp.XlaFullyShardedDataParallel, **wrapping.arguments(options))

    def wrap(layer: nn.Module, **forwarded: Any) -> nn.Module:
        """Wraps a unit: its parameters are gathered, used, and freed before the next unit's."""
        if options.use_gradient_checkpointing:
            layer = xla_fsdp.checkpoint_module(layer)
        return fsdp(layer, **forwarded)

    if options.sharding:  # from the file of --settings
        with tuning.applied(options):
            model = options.sharding.wrap(model, layers, **wrapping.arguments(options))
    else:
        if options.use_nested_fsdp:
            for name in ("conv1", "conv2", "fc1", "fc2"):
                setattr(model, name, wrap(getattr(model, name)))
        model = fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrap)

    # The optimizer gets this rank's shards; it needs no other learning rate.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * xr.world_size(), momentum=options.momentum
    )
    evaluation.vary_by_rank(options.seed)
    described, state = {"kind": "mnist"}, (model, optimizer, None)
    done, saved = checkpoints.resume(options, options.ckpt_prefix, state, described, batches)
    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(done + 1, options.num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # another order in each epoch
            meters.start_epoch(epoch)
            # The loop traces a step, which runs when the loader returns the next batch.
            with on_device(batches, options.prefetch) as loader:
                for images, labels in loader:
                    optimizer.zero_grad()
                    loss = F.nll_loss(model(images).float(), labels)
                    loss.backward()  # also averages the gradients over the ranks,
                    optimizer.step()  # so there is nothing left to reduce
                    meters.step(loss, optimizer)
                    if preempted():  # the machine is preempted: --resume continues from here
                        where = (options.ckpt_prefix, state, described)
                        checkpoints.save_and_exit(preempted, options, *where, meters)
            meters.end_epoch()

            evaluation.average_batch_statistics(model)
            meters.report(count_correct(model, held_out, options))
            saved = xla_fsdp.save_checkpoint(
                options.ckpt_prefix,
                *state,
                step=epoch,
                extra={"network": described},
                keep_last=options.keep_ckpts,
            )
    if done == options.num_epochs:  # an earlier run ended after the last epoch
        meters.nothing_left(saved, count_correct(model, held_out, options))

    # Joins the shards into one model, whose accuracy in plain torch must be the same.
    datadir = options.datadir and os.path.abspath(options.datadir)
    read = {"kind": "mnist", "datadir": datadir, "fake": options.fake_data}
    if meters.rank == 0:
        folder = closing.consolidate(options, saved, described, read)
        closing.summarize("MNIST network, fully sharded", options, meters, saved, folder)


def count_correct(model: nn.Module, batches: DataLoader, options: SimpleNamespace) -> int:
    """The number of held-out images that are classified correctly, over all ranks."""
    with evaluation.evaluating(model), on_device(batches, options.prefetch) as loader:
        hits = sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader)
        return evaluation.over_all_ranks(hits)


if __name__ == "__main__":
    script.run(main)
