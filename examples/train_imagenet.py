"""Trains ResNet-50, or any other classifier of torchvision, on ImageNet, fully sharded.

    python examples/train_imagenet.py                     # digits on 4 ranks of any machine's CPU
    python examples/train_imagenet.py --plan=v3-8         # what ImageNet would need, without a TPU
    PJRT_DEVICE=TPU python examples/train_imagenet.py --datadir=/datasets/imagenet-1k \\
        --use_nested_fsdp --num_epochs=100 --lr=0.4 --batch_size=128 --num_warmup_epochs=5 \\
        --lr_scheduler_divide_every_n_epochs=30 --lr_scheduler_divisor=10 --eval_interval=10

The last is the published run of ResNet-50 on a v3-8, which ends at 75.9 %. Its values are also the
defaults with --datadir. Without, small digits train a ResNet-18 in a few minutes. --batch_size is a
rank's, --lr is for the batch of all ranks together.

All ranks save a checkpoint after every epoch, from which --resume goes on. At the end they are
joined into one model in plain torch, which examples/evaluate.py evaluates. --help lists all flags.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, fitting, image_data, memory, networks, schedules, script, wrapping
from common.planned import launch_or_plan
from torch import nn
from torchvision import models

import xla_fsdp

flags.DEFINE_string("model", None, "a classifier of torchvision; default: resnet50")
flags.DEFINE_integer("batch_size", None, "images a rank and step; default: 128", lower_bound=1)
flags.DEFINE_integer("test_set_batch_size", 64, "the same in evaluation", lower_bound=1)
flags.DEFINE_integer("num_epochs", None, "default: 100", lower_bound=1)
flags.DEFINE_integer("eval_interval", None, "epochs between evaluations; default: 10", 1)
flags.DEFINE_integer("ckpt_interval", 1, "epochs between checkpoints", lower_bound=1)
flags.DEFINE_enum("optimizer", None, ["sgd", "adamw"], "default: that which suits the model")
flags.DEFINE_float("lr", None, "learning rate of the whole batch; default: of the model")
flags.DEFINE_float("momentum", 0.9, "momentum of SGD")
flags.DEFINE_float("weight_decay", None, "default: 1e-4 for sgd, 0.05 for adamw")
flags.DEFINE_float("label_smoothing", 0.0, "part of the target that all classes share")
flags.DEFINE_float("clip_grad_norm", 0.0, "largest norm of the gradient; 0: any")
flags.DEFINE_enum("lr_scheduler_type", None, ["step", "cosine"], "default: step for sgd")
flags.DEFINE_float("num_warmup_epochs", None, "epochs up to the full rate; default: 5", 0)
flags.DEFINE_integer("lr_scheduler_divide_every_n_epochs", None, "default: 30", lower_bound=1)
flags.DEFINE_float("lr_scheduler_divisor", 10, "what step divides the rate by", lower_bound=1)
flags.DEFINE_float("target_accuracy", None, "fail if the accuracy at the end, 0 to 100, is lower")
flags.DEFINE_bool("sync_batch_norm", False, "normalise over the batch of all ranks")
flags.DEFINE_string("ckpt_dir", "runs/imagenet/ckpt", "folder of the checkpoints, shared by all")
script.require("lr", lambda value: 0 < value < float("inf"), "must be finite, greater than 0")
script.require("momentum", lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
script.require(
    "weight_decay", lambda value: 0 <= value < float("inf"), "must be finite, at least 0"
)
script.require("label_smoothing", lambda value: 0 <= value < 1, "must be at least 0, less than 1")
script.require("clip_grad_norm", lambda value: value >= 0, "must be at least 0")
script.require("num_warmup_epochs", lambda value: 0 <= value <= 1e6, "must be from 0 to 1000000")
script.require("lr_scheduler_divisor", lambda value: 1 <= value < float("inf"), "must be finite")
script.require("target_accuracy", lambda value: 0 <= value <= 100, "must be from 0 to 100")

# Without batch norm SGD needs a low rate; transformers, and what is built like them, need AdamW.
LOW_RATE = ("alexnet", "squeezenet", "vgg")
ADAMW = ("convnext", "maxvit", "swin", "vit")
BLOCKS = {
    models.resnet.BasicBlock,
    models.resnet.Bottleneck,
    models.vision_transformer.EncoderBlock,
    models.swin_transformer.SwinTransformerBlock,
    models.swin_transformer.SwinTransformerBlockV2,
    models.maxvit.MaxVitLayer,
    models.convnext.CNBlock,
    models.densenet._DenseLayer,
    models.efficientnet.FusedMBConv,
    models.efficientnet.MBConv,
    models.mnasnet._InvertedResidual,
    models.mobilenetv2.InvertedResidual,
    models.mobilenetv3.InvertedResidual,
    models.regnet.ResBottleneckBlock,
    models.shufflenetv2.InvertedResidual,
    models.squeezenet.Fire,
}


def main(options: SimpleNamespace) -> None:
    wrapping.settle(options)
    set_defaults(options, digits=image_data.prepare(options))
    network = {"model": options.model, "num_classes": options.num_classes}
    # Statistics of one image will do if there are others on other ranks.
    together = max(2, options.batch_size) if options.sync_batch_norm else options.batch_size
    parameters = networks.try_out(**network, batch_size=together, image_size=options.image_size)
    if not options.plan:
        memory.require_for_training(parameters, "--model or --num_classes")
        checkpoints.prepare_folder(options)
    launch_or_plan(train, (options, network), options, options.num_devices, options.model)


def set_defaults(options: SimpleNamespace, digits: bool) -> None:
    """The published run's values, or for the digits such that a CPU trains for some minutes."""
    if digits:
        script.fill_in(
            options,
            model="resnet18",
            image_size=16,
            batch_size=16,
            num_epochs=6,
            eval_interval=1,
            num_warmup_epochs=1,
            lr_scheduler_type="cosine",
            lr=0.05,
        )
    script.fill_in(options, model="resnet50")
    name = options.model
    adamw = name.startswith(ADAMW)
    script.fill_in(options, optimizer="adamw" if adamw else "sgd")
    sgd = options.optimizer == "sgd"
    script.fill_in(
        options,
        image_size=299 if name == "inception_v3" else 224,
        batch_size=128,
        num_epochs=100,
        eval_interval=10,
        lr=(0.04 if name.startswith(LOW_RATE) else 0.4) if sgd else 1e-3,
        weight_decay=1e-4 if sgd else 0.05,
        lr_scheduler_type="step" if sgd else "cosine",
        num_warmup_epochs=5,
        lr_scheduler_divide_every_n_epochs=30,
    )


def train(index: int, options: SimpleNamespace, network: dict) -> None:
    """What each rank runs."""
    import torch_xla

    batches, held_out, images = image_data.batches(
        options, options.batch_size, options.test_set_batch_size
    )
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = networks.torchvision_model(**network)
    if options.sync_batch_norm:
        model = xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)
    model = wrapping.shard(model, options, torch_xla.device(), BLOCKS)
    optimizer, scheduler = optimize(model, options, len(batches))

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=options.label_smoothing)
        loss.backward()  # gradients are averaged over the ranks when it returns
        if options.clip_grad_norm:
            model.clip_grad_norm_(options.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    task = fitting.Task(
        f"{options.model}, fully sharded",
        model,
        optimizer,
        scheduler,
        step,
        batches,
        held_out,
        images,
        network={"kind": "torchvision", **network},
        description=image_data.describe(options),
        exact=options.compute_dtype == "float32",
    )
    accuracy = fitting.fit(
        task,
        options,
        options.ckpt_dir,
        options.num_epochs,
        options.eval_interval,
        options.ckpt_interval,
    )
    if options.target_accuracy and accuracy < options.target_accuracy / 100:
        raise script.Stop(f"accuracy {accuracy:.2%} is below {options.target_accuracy} %")


def optimize(model: nn.Module, options: SimpleNamespace, steps: int) -> tuple:
    """The optimizer, and the schedule of its rate; ``steps`` are those of an epoch."""
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
    if options.lr_scheduler_type == "cosine":
        warmup = round(steps * options.num_warmup_epochs)
        return optimizer, schedules.cosine_schedule(optimizer, warmup, steps * options.num_epochs)
    return optimizer, schedules.step_schedule(
        optimizer,
        steps,
        options.num_warmup_epochs,
        options.lr_scheduler_divide_every_n_epochs,
        options.lr_scheduler_divisor,
    )


if __name__ == "__main__":
    script.run(main)
