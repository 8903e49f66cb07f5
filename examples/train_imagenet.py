"""Trains ResNet-50, or any other classifier of torchvision, on ImageNet, fully sharded.

    python examples/train_imagenet.py                     # digits on 4 ranks of any machine's CPU
    python examples/train_imagenet.py --plan=v3-8         # what ImageNet would need, without a TPU
    python examples/train_imagenet.py --tune=v3-8         # and how it would be sharded best
    PJRT_DEVICE=TPU python examples/train_imagenet.py --datadir=/datasets/imagenet-1k \\
        --use_nested_fsdp --num_epochs=100 --lr=0.4 --batch_size=128 --num_warmup_epochs=5 \\
        --lr_scheduler_divide_every_n_epochs=30 --lr_scheduler_divisor=10 --eval_interval=10

The last is the published run of ResNet-50 on a v3-8, which ends at 75.9 %. Its values are also the
defaults with --datadir. Without, small digits train a ResNet-18 in a few minutes. --batch_size is a
rank's, --lr is for the batch of all ranks together.

All ranks save a checkpoint after every epoch, from which --resume goes on. At the end they are
joined into one model in plain torch, which examples/evaluate.py evaluates. --help lists all flags.
"""

from functools import partial
from types import SimpleNamespace

import networks
import torch
import torch.nn.functional as F
import wrapping
from absl import flags
from common import checkpoints, closing, evaluation, schedules, tuning
from common.batches import on_device
from common.meters import Meters
from common.script import DEFINE_number, Stop, fill_in, run
from image_batches import Source
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import xla_fsdp

flags.DEFINE_string("model", None, "a classifier of torchvision; default: resnet50")
flags.DEFINE_integer("batch_size", None, "images a rank and step; default: 128", lower_bound=1)
flags.DEFINE_integer("test_set_batch_size", 64, "the same in evaluation", lower_bound=1)
flags.DEFINE_integer("num_epochs", None, "default: 100", lower_bound=1)
flags.DEFINE_integer("eval_interval", None, "epochs between evaluations; default: 10", 1)
flags.DEFINE_integer("ckpt_interval", 1, "epochs between checkpoints", lower_bound=1)
flags.DEFINE_enum("optimizer", None, ["sgd", "adamw"], "default: that which suits the model")
DEFINE_number("lr", None, "learning rate of the whole batch; default: of the model", "(0, inf)")
DEFINE_number("momentum", 0.9, "momentum of SGD", "[0, 1)")
DEFINE_number("weight_decay", None, "default: 1e-4 for sgd, 0.05 for adamw", "[0, inf)")
DEFINE_number("label_smoothing", 0.0, "part of the target that all classes share", "[0, 1)")
DEFINE_number("clip_grad_norm", 0.0, "largest norm of the gradient; 0: any", "[0, inf]")
flags.DEFINE_enum("lr_scheduler_type", None, ["step", "cosine"], "default: step for sgd")
DEFINE_number("num_warmup_epochs", None, "epochs up to the full rate; default: 5", "[0, 1000000]")
flags.DEFINE_integer("lr_scheduler_divide_every_n_epochs", None, "default: 30", lower_bound=1)
DEFINE_number("lr_scheduler_divisor", 10, "what step divides the rate by", "[1, inf)")
DEFINE_number("target_accuracy", None, "fail if the accuracy at the end is lower", "[0, 100]")
flags.DEFINE_bool("sync_batch_norm", False, "normalise over the batch of all ranks")
flags.DEFINE_string("ckpt_dir", "runs/imagenet/ckpt", "folder of the checkpoints, shared by all")

# Without batch norm SGD needs a low rate; transformers, and what is built like them, need AdamW.
LOW_RATE = ("alexnet", "squeezenet", "vgg")
ADAMW = ("convnext", "maxvit", "swin", "vit")


def main(options: SimpleNamespace) -> None:
    wrapping.settle(options)
    tuning.settle(options, *wrapping.SHARDING)
    data = Source.find(options.datadir, options.fake_data, options.num_classes, options.plan)
    set_defaults(options, data)
    network = {"model": options.model, "num_classes": options.num_classes}
    # Statistics of one image will do if there are others on other ranks.
    together = max(2, options.batch_size) if options.sync_batch_norm else options.batch_size
    networks.try_out(options.model, options, together, "--model or --num_classes")
    checkpoints.prepare_folder(options)
    tuning.launch_plan_or_tune(train, (options, data, network), options.model)


def set_defaults(options: SimpleNamespace, data: Source) -> None:
    """The published run's values, or for the digits such that a CPU trains for some minutes."""
    if data.digits:
        fill_in(options, model="resnet18", image_size=16, batch_size=25, num_epochs=6, lr=0.05)
        fill_in(options, eval_interval=1, num_warmup_epochs=1, lr_scheduler_type="cosine")
    fill_in(options, model="resnet50", num_classes=data.num_classes)
    name = options.model
    fill_in(options, optimizer="adamw" if name.startswith(ADAMW) else "sgd")
    if options.optimizer == "sgd":
        lr = 0.04 if name.startswith(LOW_RATE) else 0.4
        fill_in(options, lr=lr, weight_decay=1e-4, lr_scheduler_type="step")
    fill_in(options, lr=1e-3, weight_decay=0.05, lr_scheduler_type="cosine", num_warmup_epochs=5)
    fill_in(options, image_size=299 if name == "inception_v3" else 224, batch_size=128)
    fill_in(options, num_epochs=100, eval_interval=10, lr_scheduler_divide_every_n_epochs=30)


def train(index: int, options: SimpleNamespace, data: Source, network: dict) -> None:
    """What each rank runs."""
    import torch_xla  # not at the top of the file: launch has to set up the runtime before

    how = {"num_workers": options.num_workers, "max_steps": options.max_steps, "seed": options.seed}
    how |= {"image_size": options.image_size, "min_crop": options.min_crop}
    batches, held_out = data.batches(options.batch_size, options.test_set_batch_size, **how)
    network = {"kind": "torchvision", **network}

    torch.manual_seed(options.seed)  # the same weights on every rank
    model = networks.torchvision_model(options.model, options.num_classes)
    if options.sync_batch_norm:
        model = xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)
    model = shard(model.to(torch_xla.device()), options)
    optimizer, scheduler = optimize(model, options, len(batches))
    evaluation.vary_by_rank(options.seed)
    state = (model, optimizer, scheduler)
    done, saved = checkpoints.resume(options, options.ckpt_dir, state, network, batches)
    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(done + 1, options.num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # shuffles anew
            meters.start_epoch(epoch)
            with on_device(batches, options.prefetch) as loader:
                for images, labels in loader:  # a step runs with the next batch
                    optimizer.zero_grad()
                    logits = model(images).float()
                    loss = F.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
                    loss.backward()  # gradients are averaged over the ranks when it returns
                    if options.clip_grad_norm:
                        model.clip_grad_norm_(options.clip_grad_norm)
                    optimizer.step()
                    meters.step(loss, optimizer)
                    scheduler.step()
                    if preempted():  # its machine is taken away: --resume goes on from here
                        where = (options.ckpt_dir, state, network)
                        checkpoints.save_and_exit(preempted, options, *where, meters)
            meters.end_epoch()

            evaluation.average_batch_statistics(model)
            last, correct = epoch == options.num_epochs, None
            if last or epoch % options.eval_interval == 0:
                correct = count_correct(model, held_out, options)
            meters.report(correct)
            if last or epoch % options.ckpt_interval == 0:
                how = {"extra": {"network": network}, "keep_last": options.keep_ckpts}
                saved = xla_fsdp.save_checkpoint(options.ckpt_dir, *state, step=epoch, **how)
    if done == options.num_epochs:  # the run before was ended after its last epoch
        meters.nothing_left(saved, count_correct(model, held_out, options))

    # All ranks' parts in one model, which plain torch must find as good.
    if meters.rank == 0:
        folder = closing.consolidate(options, saved, network, data.describe(options.image_size))
        closing.summarize(f"{options.model}, fully sharded", options, meters, saved, folder)
    accuracy, target = 100 * meters.correct / meters.images, options.target_accuracy
    if target and accuracy < target:
        raise Stop(f"accuracy {accuracy:.2f}% is below {target} %")


def shard(model: nn.Module, options: SimpleNamespace) -> nn.Module:
    """The model, wrapped as flags or settings say."""
    how = wrapping.arguments(options)
    if options.sharding:
        blocks = networks.BLOCKS.intersection(map(type, model.modules())) or None
        with tuning.applied(options):
            return options.sharding.wrap(model, blocks, **how)
    policy = wrapping.policy(options, model, networks.BLOCKS)
    fsdp = partial(xla_fsdp.XlaFullyShardedDataParallel, **how)

    def wrap(layer: nn.Module, **forwarded) -> nn.Module:
        """A unit: its parameters are gathered, used, and freed before those of the next are."""
        if options.use_gradient_checkpointing:
            layer = xla_fsdp.checkpoint_module(layer)
        return fsdp(layer, **forwarded)

    if options.use_nested_fsdp:
        for name, child in list(model.named_children()):
            if any(True for _ in child.parameters()):
                setattr(model, name, wrap(child))
    return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrap)


def optimize(model: nn.Module, options: SimpleNamespace, steps: int) -> tuple:
    """The optimizer, and the schedule of its rate; ``steps`` are those of an epoch."""
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), momentum=options.momentum, **how)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **how)
    warmup = round(steps * options.num_warmup_epochs)
    if options.lr_scheduler_type == "cosine":
        total = steps * options.num_epochs
        factor = partial(schedules.half_cosine, warmup=warmup, total=total)
    else:
        every = steps * options.lr_scheduler_divide_every_n_epochs
        divisor = options.lr_scheduler_divisor
        factor = partial(schedules.steps_down, warmup=warmup, every=every, divisor=divisor)
    return optimizer, LambdaLR(optimizer, factor)


def count_correct(model: nn.Module, batches: DataLoader, options: SimpleNamespace) -> int:
    """How many held-out images the model gets right, over all ranks."""
    with evaluation.evaluating(model), on_device(batches, options.prefetch) as loader:
        hits = sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader)
        return evaluation.over_all_ranks(hits)


if __name__ == "__main__":
    run(main)
