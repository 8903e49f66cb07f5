"""The smallest example: a ResNet that wraps itself, layer by layer, by a policy.

python examples/train_resnet_auto_wrap.py             # digits on 4 ranks of any machine's CPU
python examples/train_resnet_auto_wrap.py --plan=v3-8 # what the same needs on a TPU
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, fitting, image_data, memory, networks, script
from common.planned import launch_or_plan
from torchvision.models.resnet import BasicBlock

import xla_fsdp

flags.DEFINE_integer("batch_size", 16, "images a rank and step", lower_bound=1)
flags.DEFINE_integer("num_epochs", 5, "passes over the images", lower_bound=1)
flags.DEFINE_float("lr", 0.02, "learning rate")
flags.DEFINE_string("ckpt_dir", "runs/resnet/ckpt", "folder of the checkpoints, shared by all")
script.require("lr", lambda value: 0 < value < float("inf"), "must be finite, greater than 0")


def main(options: SimpleNamespace) -> None:
    image_data.prepare(options)
    script.fill_in(options, image_size=16)
    sizes = (options.num_classes, options.batch_size, options.image_size)
    parameters = networks.try_out("resnet18", *sizes)
    if not options.plan:
        memory.require_for_training(parameters, "--num_classes")
        checkpoints.prepare_folder(options)
    launch_or_plan(train, (options,), options, options.num_devices, "ResNet-18")


def train(index: int, options: SimpleNamespace) -> None:
    """What each rank runs."""
    network = {"kind": "torchvision", "model": "resnet18", "num_classes": options.num_classes}
    batches, held_out, images = image_data.batches(options, options.batch_size, options.batch_size)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = xla_fsdp.XlaFullyShardedDataParallel(
        networks.build(**network),
        # Every residual block becomes a unit: gathered, used, freed, one after the other.
        auto_wrap_policy=partial(
            xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls={BasicBlock}
        ),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # gradients are averaged over the ranks when it returns
        optimizer.step()
        return loss.detach()

    task = fitting.Task(
        "ResNet-18, wrapped by a policy",
        model,
        optimizer,
        None,
        step,
        batches,
        held_out,
        images,
        network=network,
        description=image_data.describe(options),
    )
    fitting.fit(task, options, options.ckpt_dir, options.num_epochs)


if __name__ == "__main__":
    script.run(main)
