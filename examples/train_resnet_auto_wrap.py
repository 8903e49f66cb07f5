"""The smallest example: a policy wraps each block of a ResNet.

python examples/train_resnet_auto_wrap.py             # digits on 4 ranks of any machine's CPU
python examples/train_resnet_auto_wrap.py --plan=v3-8 # a plan for the same on a TPU
"""

from functools import partial
from types import SimpleNamespace

import networks
import torch
from absl import flags
from common import checkpoints, closing, evaluation, launching, script
from common.batches import on_device
from common.meters import Meters
from image_batches import Source
from torchvision.models.resnet import BasicBlock

import xla_fsdp

flags.DEFINE_integer("batch_size", 16, "images of a rank in a step", lower_bound=1)
flags.DEFINE_integer("num_epochs", 5, "passes over the images", lower_bound=1)
script.DEFINE_number("lr", 0.02, "learning rate", "(0, inf)")
flags.DEFINE_string("ckpt_dir", "runs/resnet/ckpt", "folder of the checkpoints, shared by all")


def main(options: SimpleNamespace) -> None:
    data = Source.find(options.datadir, options.fake_data, options.num_classes, options.plan)
    script.fill_in(options, image_size=16, num_classes=data.num_classes)
    networks.try_out("resnet18", options, options.batch_size, "--num_classes")
    checkpoints.prepare_folder(options)
    launching.launch_or_plan(train, (options, data), "ResNet-18")


def train(index: int, options: SimpleNamespace, data: Source) -> None:  # each rank runs this
    how = {"num_workers": options.num_workers, "max_steps": options.max_steps, "seed": options.seed}
    how |= {"image_size": options.image_size, "min_crop": options.min_crop}
    batches, held_out = data.batches(options.batch_size, options.batch_size, **how)
    network = {"kind": "torchvision", "model": "resnet18", "num_classes": options.num_classes}
    torch.manual_seed(options.seed)  # the same weights on every rank
    policy = partial(xla_fsdp.transformer_auto_wrap_policy, transformer_layer_cls={BasicBlock})
    model = networks.torchvision_model("resnet18", options.num_classes)
    model = xla_fsdp.XlaFullyShardedDataParallel(model, auto_wrap_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    where = (options.ckpt_dir, (model, optimizer, None), network)
    done, saved = checkpoints.resume(options, *where, batches)
    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(done + 1, options.num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # another order in each epoch
            meters.start_epoch(epoch)
            with on_device(batches, options.prefetch) as loader:
                for images, labels in loader:  # the next batch runs the step
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    loss.backward()  # also averages the gradients over the ranks
                    optimizer.step()
                    meters.step(loss, optimizer)
                    if preempted():  # the machine is preempted: --resume continues from here
                        checkpoints.save_and_exit(preempted, options, *where, meters)
            meters.end_epoch()
            evaluation.average_batch_statistics(model)
            meters.report(count_correct(model, held_out, options))
            how = {"extra": {"network": network}, "keep_last": options.keep_ckpts}
            saved = xla_fsdp.save_checkpoint(options.ckpt_dir, model, optimizer, step=epoch, **how)
    if done == options.num_epochs:  # an earlier run ended after the last epoch
        meters.nothing_left(saved, count_correct(model, held_out, options))
    if meters.rank == 0:
        folder = closing.consolidate(options, saved, network, data.describe(options.image_size))
        closing.summarize("ResNet-18, wrapped by a policy", options, meters, saved, folder)


def count_correct(model: torch.nn.Module, batches: object, options: SimpleNamespace) -> int:
    with evaluation.evaluating(model), on_device(batches, options.prefetch) as loader:
        hits = sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader)
        return evaluation.over_all_ranks(hits)


if __name__ == "__main__":
    script.run(main)
