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
from types import SimpleNamespace

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

import xla_fsdp

flags.DEFINE_integer("batch_size", 16, "images of a rank in a step", lower_bound=1)
flags.DEFINE_integer("num_epochs", None, "default: 12; with --datadir 2", lower_bound=1)
script.DEFINE_number(
    "lr", None, "for a rank's batch; default: 0.02; with --datadir 0.01", "(0, inf)"
)
script.DEFINE_number("momentum", 0.5, "momentum of SGD", "[0, 1)")
flags.DEFINE_bool("drop_last", True, "leave out the last batch of an epoch if it is smaller")
flags.DEFINE_string("ckpt_dir", "runs/mnist/ckpt", "folder of the checkpoints, shared by all")
flags.DEFINE_alias("ckpt_prefix", "ckpt_dir")
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
    wrapping.set_defaults(options)
    tuning.read_settings(options, *wrapping.SHARDING)
    script.exclude(options, "fake_data", "datadir")
    if options.datadir:
        script.fill_in(options, lr=0.01, num_epochs=2)
    else:
        script.fill_in(options, lr=0.02, num_epochs=12)
    checkpoints.prepare_folder(options)
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

    # Data: every rank reads another part.
    rank, world_size = xr.global_ordinal(), xr.world_size()
    batches = training_batches(
        digits.load(True, options.datadir, options.fake_data),
        rank,
        world_size,
        options.batch_size,
        seed=options.seed,
        drop_last=options.drop_last,
        max_steps=options.max_steps,
    )
    held_out = test_batches(
        digits.load(False, options.datadir, options.fake_data),
        rank,
        world_size,
        options.batch_size,
    )

    # Model: its layers are wrapped one by one, then the rest.
    model = copy.deepcopy(network).to(torch_xla.device())  # ranks may be threads, which share it
    model = wrapping.shard(
        model, options, ("conv1", "conv2", "fc1", "fc2"), blocks={nn.Conv2d, nn.Linear}
    )

    # Optimizer: it gets this rank's shards. --lr is for one rank's batch, so it is multiplied here.
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * world_size, momentum=options.momentum
    )
    evaluation.vary_by_rank(options.seed)

    state = checkpoints.TrainingState(model, optimizer, None, {"kind": "mnist"})
    epochs_done, saved = checkpoints.resume(options, state, batches)

    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(epochs_done + 1, options.num_epochs + 1):
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
                        checkpoints.save_and_exit(preempted, options, state, meters)
            meters.end_epoch()

            evaluation.average_batch_statistics(model)
            meters.report(evaluation.count_correct(model, held_out, options.prefetch))
            saved = xla_fsdp.save_checkpoint(
                options.ckpt_dir,
                model,
                optimizer,
                step=epoch,
                extra={"network": state.network},
                keep_last=options.keep_ckpts,
            )
    if epochs_done == options.num_epochs:  # an earlier run ended after the last epoch
        correct = evaluation.count_correct(model, held_out, options.prefetch)
        meters.report_finished_run(saved, correct)

    # Join the shards into one model, whose accuracy in plain torch must be the same.
    if rank == 0:
        datadir = options.datadir and os.path.abspath(options.datadir)
        data = {"kind": "mnist", "datadir": datadir, "fake": options.fake_data}
        joined = closing.consolidate(options, saved, state.network, data)
        closing.summarize("MNIST network, fully sharded", options, meters, saved, joined)


if __name__ == "__main__":
    script.run(main)
