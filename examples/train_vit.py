"""Trains a vision transformer from scratch, up to tens of billions of parameters, fully sharded.

    python examples/train_vit.py                          # digits on 4 ranks of any machine's CPU
    python examples/train_vit.py --plan=v3-128            # a plan for 10 billion, without a TPU
    python examples/train_vit.py --plan=v4-512 --embed_dim=10240 --num_heads=64 --num_blocks=48
                                                          # a plan for 60 billion
    python examples/train_vit.py --tune=v3-128 --settings=v3.json   # searches the fastest sharding
    PJRT_DEVICE=TPU python examples/train_vit.py --datadir=/datasets/imagenet-1k \\
        --ckpt_dir=/shared/vit --resume                   # on every host of a pod: examples/pod/

With --datadir, --fake_data or --plan the defaults are those of the 10-billion-parameter run on a
v3-128: 32 blocks of width 5120, 1024 images in a step. Otherwise a small model learns digits in
minutes. --batch_size is that of all ranks. Flags are named as in the public example for XLA. No
host has the full model: a block is sharded before the next one is created. Blocks run as one loop
of the program, which compiles in less time and memory; --noscan_blocks turns this off.
"""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, closing, evaluation, schedules, tuning
from common.batches import on_device
from common.meters import Meters
from common.script import DEFINE_number, Stop, exclude, fill_in, given, run
from image_batches import Source
from networks import VisionTransformer, require_for_training, sizes_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import xla_fsdp

flags.DEFINE_integer("patch_size", None, "pixels along an edge; default: 14", lower_bound=1)
flags.DEFINE_integer("embed_dim", None, "width; default: 5120", lower_bound=1)
flags.DEFINE_integer("num_heads", None, "attention heads; default: 32", lower_bound=1)
flags.DEFINE_integer("num_blocks", None, "transformer blocks; default: 32", lower_bound=1)
DEFINE_number("mlp_ratio", 4.0, "hidden width of the perceptrons / embed_dim", "(0, inf)")
DEFINE_number("pos_dropout", 0.0, "dropout after the positions", "[0, 1)")
DEFINE_number("att_dropout", 0.0, "dropout of attention weights", "[0, 1)")
DEFINE_number("mlp_dropout", 0.0, "dropout in perceptrons and after each half block", "[0, 1)")
flags.DEFINE_integer("batch_size", None, "images of all ranks in a step; default: 1024", 1)
flags.DEFINE_integer("num_epochs", None, "default: 300", lower_bound=1)
DEFINE_number("lr", None, "learning rate after the warm-up; default: 1e-3", "(0, inf)")
DEFINE_number("weight_decay", 0.1, "weight decay of AdamW", "[0, inf)")
DEFINE_number("clip_grad_norm", 1.0, "maximum gradient norm; 0: no clipping", "[0, inf]")
flags.DEFINE_integer("warmup_steps", None, "steps of the warm-up; default: 10000", 0)
flags.DEFINE_string("ckpt_dir", "runs/vit/ckpt", "folder of the checkpoints, shared by all hosts")
flags.DEFINE_integer("ckpt_epoch_interval", None, "epochs between checkpoints; default: 10", 1)
flags.DEFINE_integer("test_epoch_interval", None, "epochs between evaluations; default: 10", 1)
flags.DEFINE_alias("log_step_interval", "log_steps")
flags.DEFINE_enum("compute_dtype", None, ["float32", "bfloat16"], "default: bfloat16")
flags.DEFINE_bool("no_grad_ckpt", False, "keep all activations for the backward")
flags.DEFINE_bool("no_reshard_after_forward", False, "keep full parameters for the backward")
flags.DEFINE_bool("flatten_parameters", False, "store each block's parameters as one vector")
flags.DEFINE_bool("scan_blocks", None, "run blocks as one compiled loop; default: if possible")
flags.DEFINE_bool("run_without_fsdp", False, "replicate the model on every rank, to compare")
flags.DEFINE_bool("shard_on_cpu", True, "shard blocks on the host, not on the device")

# Flags that blocks in one loop do not support.
NO_LOOP = (
    "noshard_on_cpu",
    "no_reshard_after_forward",
    "flatten_parameters",
    "no_grad_ckpt",
    "run_without_fsdp",
)
# Flags that exclude --settings, which also chooses these options.
SHARDING = ("shard_on_cpu", "scan_blocks", *NO_LOOP[1:])


def main(options: SimpleNamespace) -> None:
    if tuning.read_settings(options, *SHARDING):
        options.scan_blocks = False
    data = Source.find(options.datadir, options.fake_data, options.num_classes, options.plan)
    set_defaults(options, data)
    sizes, parameters = sizes_of(options)
    checkpoints.prepare_folder(options)
    title = f"vision transformer, {parameters:,} parameters"
    print(title, flush=True)
    tuning.launch_plan_or_tune(train, (options, data, sizes, parameters), title)


def set_defaults(options: SimpleNamespace, data: Source) -> None:
    """Sets defaults: of the run with 10 billion parameters, or for minutes on a CPU."""
    if data.digits:
        fill_in(options, image_size=16, patch_size=4, embed_dim=128, num_heads=4, num_blocks=2)
        fill_in(options, batch_size=32, num_epochs=12, lr=2e-3, warmup_steps=50)
        fill_in(options, compute_dtype="float32", ckpt_epoch_interval=4, test_epoch_interval=4)
    fill_in(options, image_size=224, patch_size=14, embed_dim=5120, num_heads=32, num_blocks=32)
    fill_in(options, batch_size=1024, num_epochs=300, lr=1e-3, warmup_steps=10_000)
    fill_in(options, compute_dtype="bfloat16", ckpt_epoch_interval=10, test_epoch_interval=10)
    fill_in(options, num_classes=data.num_classes)
    exclude(options, "scan_blocks", *NO_LOOP)
    fill_in(options, scan_blocks=not given(options, *NO_LOOP))
    exclude(
        options,
        "run_without_fsdp",
        "noshard_on_cpu",
        "no_reshard_after_forward",
        "flatten_parameters",
    )


def batch_size_of_rank(options: SimpleNamespace, world_size: int) -> int:
    """The part of --batch_size, which is for all ranks; the batch of --settings is of one rank."""
    if options.sharding and options.sharding.batch:
        return options.batch_size
    if options.batch_size % world_size:
        raise Stop(
            f"--batch_size={options.batch_size} must be a multiple of the number of ranks, "
            f"{world_size}",
            code=2,
        )
    return options.batch_size // world_size


def build(options: SimpleNamespace, sizes: dict, device: torch.device) -> nn.Module:
    """Builds the model, and shards each block before the next one is created."""
    compute_dtype = getattr(torch, options.compute_dtype)

    def wrap(module: nn.Module) -> nn.Module:
        return xla_fsdp.XlaFullyShardedDataParallel(
            module if options.shard_on_cpu else module.to(device),
            compute_dtype=compute_dtype,
            reshard_after_forward=not options.no_reshard_after_forward,
            flatten_parameters=options.flatten_parameters,
        )

    def join(blocks: Iterable[nn.Module]) -> nn.Module:
        if options.sharding:  # from the file of --settings
            return options.sharding.join(blocks, compute_dtype=compute_dtype)
        if options.scan_blocks:
            return xla_fsdp.scan_blocks(blocks, compute_dtype=compute_dtype)
        if not options.no_grad_ckpt:
            blocks = (xla_fsdp.checkpoint_module(block) for block in blocks)
        if not options.run_without_fsdp:
            blocks = (wrap(block) for block in blocks)
        return nn.Sequential(*blocks)

    model = VisionTransformer(
        **sizes,
        pos_dropout=options.pos_dropout,
        att_dropout=options.att_dropout,
        mlp_dropout=options.mlp_dropout,
        join=join,
    )
    if options.sharding:
        return options.sharding.wrap_root(model, compute_dtype=compute_dtype)
    return model.to(device) if options.run_without_fsdp else wrap(model)


def train(index: int, options: SimpleNamespace, data: Source, sizes: dict, parameters: int) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla  # not at the top of the file: launch must set up the runtime first
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    if not options.plan:
        copies = xr.world_size() if options.run_without_fsdp else 1
        require_for_training(parameters * copies, "--embed_dim or --num_blocks")
    batch_size = batch_size_of_rank(options, xr.world_size())
    batches, held_out = data.batches(options, batch_size, batch_size, "bicubic")

    torch.manual_seed(options.seed)  # the same weights on every rank
    with tuning.applied(options):
        model = build(options, sizes, torch_xla.device())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    factor = partial(
        schedules.half_cosine,
        warmup=options.warmup_steps,
        total=len(batches) * options.num_epochs,
    )
    scheduler = LambdaLR(optimizer, factor)
    evaluation.vary_by_rank(options.seed)

    network = {"kind": "vit", **sizes}
    state = checkpoints.TrainingState(model, optimizer, scheduler, network)
    epochs_done, saved = checkpoints.resume(options, state, batches)
    meters = Meters(options, batches, held_out)
    with meters, xla_fsdp.Preemption(options.preemption_grace) as preempted:
        for epoch in range(epochs_done + 1, options.num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # another order in each epoch
            meters.start_epoch(epoch)
            with on_device(batches, options.prefetch) as loader:
                for images, labels in loader:  # the next batch runs the step
                    loss = F.cross_entropy(model(images).float(), labels)
                    loss.backward()  # also averages the gradients over the ranks
                    if options.run_without_fsdp:
                        xm.reduce_gradients(optimizer)
                    if options.clip_grad_norm and options.run_without_fsdp:
                        nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
                    elif options.clip_grad_norm:
                        model.clip_grad_norm_(options.clip_grad_norm)
                    optimizer.step()
                    meters.step(loss, optimizer)
                    scheduler.step()
                    optimizer.zero_grad()
                    if preempted():  # the machine is preempted: --resume continues from here
                        checkpoints.save_and_exit(preempted, options, state, meters)
            meters.end_epoch()

            is_last = epoch == options.num_epochs
            correct = None
            if is_last or epoch % options.test_epoch_interval == 0:
                correct = evaluation.count_correct(model, held_out, options.prefetch)
            meters.report(correct)

            if is_last or epoch % options.ckpt_epoch_interval == 0:
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
        images = data.describe(options.image_size, "bicubic")
        joined = closing.consolidate(options, saved, network, images)
        closing.summarize("Vision transformer, fully sharded", options, meters, saved, joined)


if __name__ == "__main__":
    run(main)
