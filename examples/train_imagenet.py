"""Trains ResNet-50, or any other classifier of torchvision, on ImageNet, fully sharded.

    python examples/train_imagenet.py                     # digits on 4 ranks of any machine's CPU
    python examples/train_imagenet.py --plan=v3-8         # a plan for ImageNet, without a TPU
    python examples/train_imagenet.py --tune=v3-8         # search of the fastest sharding
    PJRT_DEVICE=TPU python examples/train_imagenet.py --datadir=/datasets/imagenet-1k \\
        --use_nested_fsdp --num_epochs=100 --lr=0.4 --batch_size=128 --num_warmup_epochs=5 \\
        --lr_scheduler_divide_every_n_epochs=30 --lr_scheduler_divisor=10 --eval_interval=10

The last command is the published run of ResNet-50 on a v3-8, with an accuracy of 75.9 %. Its values
are also the defaults with --datadir. Without --datadir, a ResNet-18 is trained on small digits in a
few minutes. --batch_size is that of one rank, --lr is for the batch of all ranks together.

All ranks save a checkpoint after every epoch, from which --resume continues. At the end the shards
are joined into one model, which examples/evaluate.py evaluates in plain torch. --help lists all
flags.
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

import xla_fsdp

flags.DEFINE_string("model", None, "a classifier of torchvision; default: resnet50")
flags.DEFINE_integer("batch_size", None, "images of a rank in a step; default: 128", lower_bound=1)
flags.DEFINE_integer("test_set_batch_size", 64, "images of a rank in a test batch", lower_bound=1)
flags.DEFINE_integer("num_epochs", None, "default: 100", lower_bound=1)
flags.DEFINE_integer("eval_interval", None, "epochs between evaluations; default: 10", 1)
flags.DEFINE_integer("ckpt_interval", 1, "epochs between checkpoints", lower_bound=1)
flags.DEFINE_enum("optimizer", None, ["sgd", "adamw"], "default: depends on the model")
DEFINE_number("lr", None, "rate for all ranks' batch; default: by model", "(0, inf)")
DEFINE_number("momentum", 0.9, "momentum of SGD", "[0, 1)")
DEFINE_number("weight_decay", None, "default: 1e-4 for sgd, 0.05 for adamw", "[0, inf)")
DEFINE_number("label_smoothing", 0.0, "part of the target for all classes", "[0, 1)")
DEFINE_number("clip_grad_norm", 0.0, "maximum gradient norm; 0: no clipping", "[0, inf]")
flags.DEFINE_enum("lr_scheduler_type", None, ["step", "cosine"], "default: step for sgd")
DEFINE_number("num_warmup_epochs", None, "epochs of the warm-up; default: 5", "[0, 1000000]")
flags.DEFINE_integer("lr_scheduler_divide_every_n_epochs", None, "default: 30", lower_bound=1)
DEFINE_number("lr_scheduler_divisor", 10, "divisor of the rate for step", "[1, inf)")
DEFINE_number("target_accuracy", None, "fail if the accuracy at the end is lower", "[0, 100]")
flags.DEFINE_bool("sync_batch_norm", False, "normalise over the batches of all ranks")
flags.DEFINE_string("ckpt_dir", "runs/imagenet/ckpt", "folder of the checkpoints, shared by all")

# Models without batch norm need a low rate with SGD. Transformers and similar models need AdamW.
LOW_RATE = ("alexnet", "squeezenet", "vgg")
ADAMW = ("convnext", "maxvit", "swin", "vit")


def main(options: SimpleNamespace) -> None:
    wrapping.set_defaults(options)
    tuning.read_settings(options, *wrapping.SHARDING)
    data = Source.find(options.datadir, options.fake_data, options.num_classes, options.plan)
    set_defaults(options, data)
    network = {"kind": "torchvision", "model": options.model, "num_classes": options.num_classes}
    networks.try_out(options)
    checkpoints.prepare_folder(options)
    tuning.launch_plan_or_tune(train, (options, data, network), options.model)


def set_defaults(options: SimpleNamespace, data: Source) -> None:
    """Sets defaults: those of the published run, or for minutes of training on a CPU."""
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


def optimize(
    model: nn.Module, options: SimpleNamespace, steps_of_epoch: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and the schedule of its learning rate."""
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=options.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
        )
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.lr, weight_decay=options.weight_decay
        )
    warmup = round(steps_of_epoch * options.num_warmup_epochs)
    if options.lr_scheduler_type == "cosine":
        factor = partial(
            schedules.half_cosine, warmup=warmup, total=steps_of_epoch * options.num_epochs
        )
    else:
        factor = partial(
            schedules.steps_down,
            warmup=warmup,
            every=steps_of_epoch * options.lr_scheduler_divide_every_n_epochs,
            divisor=options.lr_scheduler_divisor,
        )
    return optimizer, LambdaLR(optimizer, factor)


def train(index: int, options: SimpleNamespace, data: Source, network: dict) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla  # not at the top of the file: launch must set up the runtime first

    batches, held_out = data.batches(options, options.batch_size, options.test_set_batch_size)

    torch.manual_seed(options.seed)  # the same weights on every rank
    model = networks.torchvision_model(options.model, options.num_classes)
    if options.sync_batch_norm:
        model = xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)
    children = [name for name, child in model.named_children() if list(child.parameters())]
    model = wrapping.shard(model.to(torch_xla.device()), options, children, networks.BLOCKS)
    optimizer, scheduler = optimize(model, options, steps_of_epoch=len(batches))
    evaluation.vary_by_rank(options.seed)

    state = checkpoints.TrainingState(model, optimizer, scheduler, network)
    epochs_done, saved = checkpoints.resume(options, state, batches)
    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(epochs_done + 1, options.num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # another order in each epoch
            meters.start_epoch(epoch)
            with on_device(batches, options.prefetch) as loader:
                for images, labels in loader:  # the next batch runs the step
                    optimizer.zero_grad()
                    logits = model(images).float()
                    loss = F.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
                    loss.backward()  # also averages the gradients over the ranks
                    if options.clip_grad_norm:
                        model.clip_grad_norm_(options.clip_grad_norm)
                    optimizer.step()
                    meters.step(loss, optimizer)
                    scheduler.step()
                    if preempted():  # the machine is preempted: --resume continues from here
                        checkpoints.save_and_exit(preempted, options, state, meters)
            meters.end_epoch()

            evaluation.average_batch_statistics(model)
            is_last = epoch == options.num_epochs
            correct = None
            if is_last or epoch % options.eval_interval == 0:
                correct = evaluation.count_correct(model, held_out, options.prefetch)
            meters.report(correct)

            if is_last or epoch % options.ckpt_interval == 0:
                saved = xla_fsdp.save_checkpoint(
                    options.ckpt_dir,
                    model,
                    optimizer,
                    scheduler,
                    step=epoch,
                    extra={"network": network},
                    keep_last=options.keep_ckpts,
                )
    if epochs_done == options.num_epochs:  # an earlier run ended after the last epoch
        correct = evaluation.count_correct(model, held_out, options.prefetch)
        meters.report_finished_run(saved, correct)

    # Join the shards into one model, whose accuracy in plain torch must be the same.
    if meters.rank == 0:
        joined = closing.consolidate(options, saved, network, data.describe(options.image_size))
        closing.summarize(f"{options.model}, fully sharded", options, meters, saved, joined)
    accuracy = 100 * meters.correct / meters.images
    if options.target_accuracy and accuracy < options.target_accuracy:
        raise Stop(f"accuracy {accuracy:.2f}% is below {options.target_accuracy} %")


if __name__ == "__main__":
    run(main)
