"""Trains a vision transformer from scratch, up to tens of billions of parameters, fully sharded.

    python examples/train_vit.py                          # digits on 4 ranks of any machine's CPU
    python examples/train_vit.py --plan=v3-128            # what 10 billion need, without a TPU
    python examples/train_vit.py --plan=v4-512 --embed_dim=10240 --num_heads=64 --num_blocks=48
                                                          # and 60 billion
    PJRT_DEVICE=TPU python examples/train_vit.py --datadir=/datasets/imagenet-1k \\
        --ckpt_dir=/shared/vit --resume                   # on every host of a pod: examples/pod/

The defaults with --datadir, --fake_data or --plan are those of the 10-billion-parameter run on a
v3-128: 32 blocks of width 5120, 1024 images a step. Without, a small one learns digits in minutes.
--batch_size is that of all ranks together. Flags are named as in the public example for XLA.

No host ever holds the model: a block is built, cut into shards and dropped before the next one.
The blocks are one loop of the program, which takes minutes less to compile, and far less memory;
with --noscan_blocks each is wrapped by itself.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from absl import flags
from common import checkpoints, fitting, image_data, memory, schedules, script
from common.planned import launch_or_plan
from common.vit import VisionTransformer, count_parameters
from torch import nn

import xla_fsdp
from xla_fsdp import compiler_options

flags.DEFINE_integer("patch_size", None, "pixels along an edge; default: 14", lower_bound=1)
flags.DEFINE_integer("embed_dim", None, "width; default: 5120", lower_bound=1)
flags.DEFINE_integer("num_heads", None, "attention heads; default: 32", lower_bound=1)
flags.DEFINE_integer("num_blocks", None, "transformer blocks; default: 32", lower_bound=1)
flags.DEFINE_float("mlp_ratio", 4.0, "hidden width of the perceptrons over embed_dim")
flags.DEFINE_float("pos_dropout", 0.0, "dropout after the positions")
flags.DEFINE_float("att_dropout", 0.0, "dropout of attention weights")
flags.DEFINE_float("mlp_dropout", 0.0, "dropout in the perceptrons and after each half block")
flags.DEFINE_integer("batch_size", None, "images a step of all ranks; default: 1024", 1)
flags.DEFINE_integer("num_epochs", None, "default: 300", lower_bound=1)
flags.DEFINE_float("lr", None, "learning rate after the warm-up; default: 1e-3")
flags.DEFINE_float("weight_decay", 0.1, "of AdamW")
flags.DEFINE_float("clip_grad_norm", 1.0, "largest norm of the gradient; 0: any")
flags.DEFINE_integer("warmup_steps", None, "steps up to the full rate; default: 10000", 0)
flags.DEFINE_string("ckpt_dir", "runs/vit/ckpt", "folder of the checkpoints, shared by all hosts")
flags.DEFINE_integer("ckpt_epoch_interval", None, "epochs between checkpoints; default: 10", 1)
flags.DEFINE_integer("test_epoch_interval", None, "epochs between evaluations; default: 10", 1)
flags.DEFINE_alias("log_step_interval", "log_steps")
flags.DEFINE_enum("compute_dtype", None, ["float32", "bfloat16"], "default: bfloat16")
flags.DEFINE_bool("no_grad_ckpt", False, "keep all activations for the backward")
flags.DEFINE_bool("no_reshard_after_forward", False, "keep full parameters for the backward")
flags.DEFINE_bool("flatten_parameters", False, "store each block's parameters as one vector")
flags.DEFINE_bool(
    "scan_blocks", None, "blocks as one loop that is compiled once; default: where possible"
)
flags.DEFINE_bool("run_without_fsdp", False, "every rank holds the whole model, to compare")
flags.DEFINE_bool("shard_on_cpu", True, "cut blocks into shards on the host, not on the device")
for name in ("pos_dropout", "att_dropout", "mlp_dropout"):
    script.require(name, lambda value: 0 <= value < 1, "must be at least 0 and less than 1")
script.require("lr", lambda value: 0 < value < float("inf"), "must be finite, greater than 0")
script.require(
    "mlp_ratio", lambda value: 0 < value < float("inf"), "must be finite, greater than 0"
)
script.require(
    "weight_decay", lambda value: 0 <= value < float("inf"), "must be finite, at least 0"
)
script.require("clip_grad_norm", lambda value: value >= 0, "must be at least 0")


def main(options: SimpleNamespace) -> None:
    set_defaults(options, digits=image_data.prepare(options))
    for whole, part in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
        if getattr(options, whole) % getattr(options, part):
            raise script.Stop(
                f"--{whole}={getattr(options, whole)} is not a multiple of "
                f"--{part}={getattr(options, part)}",
                code=2,
            )
    if options.embed_dim * options.mlp_ratio < 1:
        raise script.Stop(
            f"--mlp_ratio={options.mlp_ratio} of --embed_dim={options.embed_dim} leaves no hidden "
            f"width; at least {1 / options.embed_dim:g}",
            code=2,
        )
    settle_wrapping(options)
    if options.scan_blocks:
        compiler_options.add_to_environment(compiler_options.FOR_LOOPS)
    names = "image_size patch_size embed_dim num_heads num_blocks mlp_ratio num_classes"
    network = {name: getattr(options, name) for name in names.split()}
    try:
        count = count_parameters(**network)
    except (OverflowError, RuntimeError) as error:
        sizes = ", ".join(f"--{name}={value}" for name, value in network.items())
        raise script.Stop(f"{sizes}: larger than any tensor; choose less", code=2) from error
    if not options.plan:
        checkpoints.prepare_folder(options)
    title = f"vision transformer, {count:,} parameters"
    print(title, flush=True)
    launch_or_plan(train, (options, network, count), options, options.num_devices, title)


def settle_wrapping(options: SimpleNamespace) -> None:
    """Blocks become one loop unless a flag says what a loop can not have.

    Raises:
        Stop: with code 2: flags that exclude each other.
    """
    wrapped = {
        "--no_reshard_after_forward": options.no_reshard_after_forward,
        "--flatten_parameters": options.flatten_parameters,
        "--noshard_on_cpu": not options.shard_on_cpu,
    }
    asked = [flag for flag, given in wrapped.items() if given]
    if options.run_without_fsdp and asked:
        raise script.Stop(f"--run_without_fsdp wraps nothing: it excludes {asked[0]}", code=2)
    asked += ["--no_grad_ckpt"] * options.no_grad_ckpt
    asked += ["--run_without_fsdp"] * options.run_without_fsdp
    script.fill_in(options, scan_blocks=not asked)
    if options.scan_blocks and asked:
        raise script.Stop(f"--scan_blocks excludes {asked[0]}", code=2)


def set_defaults(options: SimpleNamespace, digits: bool) -> None:
    """Those of the run with 10 billion parameters, or of one that a CPU trains in minutes."""
    if digits:
        script.fill_in(
            options,
            image_size=16,
            patch_size=4,
            embed_dim=128,
            num_heads=4,
            num_blocks=2,
            batch_size=32,
            num_epochs=12,
            lr=2e-3,
            warmup_steps=50,
            compute_dtype="float32",
            ckpt_epoch_interval=4,
            test_epoch_interval=4,
        )
    script.fill_in(
        options,
        image_size=224,
        patch_size=14,
        embed_dim=5120,
        num_heads=32,
        num_blocks=32,
        batch_size=1024,
        num_epochs=300,
        lr=1e-3,
        warmup_steps=10_000,
        compute_dtype="bfloat16",
        ckpt_epoch_interval=10,
        test_epoch_interval=10,
    )


def train(index: int, options: SimpleNamespace, network: dict, parameters: int) -> None:
    """What each rank runs."""
    import torch_xla
    import torch_xla.runtime as xr

    if not options.plan:
        copies = xr.world_size() if options.run_without_fsdp else 1
        memory.require_for_training(parameters * copies, "--embed_dim or --num_blocks")
    batch_size, left = divmod(options.batch_size, xr.world_size())
    if left:
        raise script.Stop(
            f"--batch_size={options.batch_size} can not be divided over {xr.world_size()} ranks",
            code=2,
        )
    batches, held_out, images = image_data.batches(options, batch_size, batch_size, "bicubic")
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = build(options, network, torch_xla.device())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    steps = len(batches) * options.num_epochs
    scheduler = schedules.cosine_schedule(optimizer, options.warmup_steps, steps)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        clip(model, optimizer, options)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    task = fitting.Task(
        "Vision transformer, fully sharded",
        model,
        optimizer,
        scheduler,
        step,
        batches,
        held_out,
        images,
        network={"kind": "vit", **network},
        description=image_data.describe(options, "bicubic"),
        exact=options.compute_dtype == "float32",
    )
    fitting.fit(
        task,
        options,
        options.ckpt_dir,
        options.num_epochs,
        options.test_epoch_interval,
        options.ckpt_epoch_interval,
    )


def build(options: SimpleNamespace, network: dict, device: torch.device) -> nn.Module:
    """The model, sharded block by block while it is built."""
    fsdp_options = {
        "compute_dtype": getattr(torch, options.compute_dtype),
        "reshard_after_forward": not options.no_reshard_after_forward,
        "flatten_parameters": options.flatten_parameters,
    }

    def wrap(module: nn.Module) -> nn.Module:
        module = module if options.shard_on_cpu else module.to(device)
        return xla_fsdp.XlaFullyShardedDataParallel(module, **fsdp_options)

    def join(blocks: Iterable[nn.Module]) -> nn.Module:
        if options.scan_blocks:
            return xla_fsdp.scan_blocks(blocks, compute_dtype=fsdp_options["compute_dtype"])
        if not options.no_grad_ckpt:
            blocks = (xla_fsdp.checkpoint_module(block) for block in blocks)
        if not options.run_without_fsdp:
            blocks = (wrap(block) for block in blocks)
        return nn.Sequential(*blocks)

    dropouts = {
        name: getattr(options, name) for name in ("pos_dropout", "att_dropout", "mlp_dropout")
    }
    model = VisionTransformer(**network, **dropouts, join=join)
    return model.to(device) if options.run_without_fsdp else wrap(model)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, options: SimpleNamespace) -> None:
    """Limits the norm of the gradient of all ranks, which a wrapped model has reduced already."""
    if options.run_without_fsdp:
        import torch_xla.core.xla_model as xm

        xm.reduce_gradients(optimizer)
        if options.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
    elif options.clip_grad_norm:
        model.clip_grad_norm_(options.clip_grad_norm)


if __name__ == "__main__":
    script.run(main)
