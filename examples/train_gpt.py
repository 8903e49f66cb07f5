"""Trains a decoder of the GPT-3 family from scratch on text, fully sharded.

    python examples/train_gpt.py                          # a tiny one on 4 ranks of any CPU
    python examples/train_gpt.py --arch=13B --plan=v4-32  # a plan for 13 billion, without a TPU
    PJRT_DEVICE=TPU python examples/train_gpt.py --arch=13B --data=/shared/tokens \\
        --ckpt_dir=/shared/gpt --resume                   # on every host of a pod: examples/pod/

Flags and defaults are those of fairseq's run with 13 billion parameters, but the tiny model has
defaults to learn the bytes of Python's texts in minutes. --batch_size is that of one rank.
"""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import gpt
import tokens
import torch
from absl import flags
from common import checkpoints, closing, evaluation, tuning
from common.batches import on_device
from common.script import DEFINE_number, Stop, exclude, fill_in, given, run
from networks import require_for_training
from torch import nn
from updates import Updates, optimize

import xla_fsdp

flags.DEFINE_enum("arch", "tiny", list(gpt.FAMILY), "size of the model")
flags.DEFINE_integer("vocab_size", None, f"default: {gpt.VOCABULARY}; tiny: that of --data", 1)
flags.DEFINE_integer("positions", None, f"longest sequence; default: {gpt.POSITIONS}", 1)
DTYPES = ["float32", "bfloat16"]
flags.DEFINE_enum("compute_dtype", None, DTYPES, "default: bfloat16, tiny: float32")
flags.DEFINE_bool("fp16", False, "compute in float16, with loss scaling")
DEFINE_number("fp16_init_scale", 128.0, "initial loss scale", "(0, inf)")
flags.DEFINE_bool("cpu_offload", False, "keep shards and optimizer on the host's CPU")
flags.DEFINE_bool("stream", False, "offload, and load blocks only to compute them")
flags.DEFINE_bool("no_reshard_after_forward", False, "keep full parameters for the backward")
flags.DEFINE_bool("checkpoint_activations", None, "recompute blocks; default: if scanned")
flags.DEFINE_bool("offload_activations", False, "store inputs of blocks on the host")
flags.DEFINE_bool("scan_blocks", None, "run blocks as one compiled loop; default: if possible")
flags.DEFINE_string("ckpt_dir", "runs/gpt/ckpt", "folder of the checkpoints, shared by all hosts")

# Flags that blocks in one loop do not support.
NO_LOOP = ("no_reshard_after_forward", "nocheckpoint_activations", "stream")
# Flags that exclude --settings, which also chooses these options.
SHARDING = (
    "scan_blocks",
    "checkpoint_activations",
    "offload_activations",
    "stream",
    "no_reshard_after_forward",
)


def main(options: SimpleNamespace) -> None:
    tuning.read_settings(options, *SHARDING)
    set_defaults(options)
    prompt = []
    vocabulary = tokens.byte_level().get_vocab_size()
    if not options.plan:
        data = tokens.prepare(options)
        prompt = tokens.encode_prompt(data, options)
        vocabulary = data.vocabulary
    fill_in(options, vocab_size=vocabulary if options.arch == "tiny" else gpt.VOCABULARY)
    if not options.plan and vocabulary > options.vocab_size:
        raise Stop(
            f"{options.data} has a vocabulary of {vocabulary}, more than "
            f"--vocab_size={options.vocab_size}",
            code=2,
        )
    # Large logits are computed in parts. The loop over the parts does not support float16.
    options.fused = options.vocab_size > 8192 and not options.fp16

    size = gpt.FAMILY[options.arch]
    sizes = {"vocabulary": options.vocab_size, "positions": options.positions, **size._asdict()}
    parameters = gpt.count_parameters(options.vocab_size, options.positions, size)
    checkpoints.prepare_folder(options)
    title = f"GPT {options.arch}, {parameters:,} parameters"
    print(title, flush=True)
    tuning.launch_plan_or_tune(train, (options, sizes, parameters, prompt), title)


def set_defaults(options: SimpleNamespace) -> None:
    """Sets defaults: of fairseq's run with 13 billion parameters, or for minutes on a CPU."""
    exclude(options, "fp16", "compute_dtype")
    exclude(options, "scan_blocks", *NO_LOOP)
    exclude(options, "offload_activations", "nocheckpoint_activations", "stream")
    exclude(options, "stream", "no_reshard_after_forward")
    fill_in(options, scan_blocks=not given(options, *NO_LOOP), data=tokens.BYTES)
    fill_in(options, compute_dtype="float16" if options.fp16 else None)
    if options.arch == "tiny":
        fill_in(options, tokens_per_sample=64, positions=130, max_update=300, lr=3e-3)
        fill_in(options, warmup_updates=30, compute_dtype="float32", valid_samples=256)
    fill_in(options, tokens_per_sample=2048, positions=gpt.POSITIONS, max_update=10, lr=1e-4)
    fill_in(options, warmup_updates=5, compute_dtype="bfloat16")
    fill_in(options, total_num_update=options.max_update, checkpoint_activations=options.stream)
    if options.tokens_per_sample > options.positions:
        raise Stop(
            f"--tokens_per_sample={options.tokens_per_sample} is longer than the model's "
            f"--positions={options.positions}",
            code=2,
        )
    options.cpu_offload |= options.stream


def build(options: SimpleNamespace, sizes: dict) -> nn.Module:
    """Builds the model, and shards each block before the next one is created."""
    from xla_fsdp.layers import linear_cross_entropy, scaled_dot_product_attention

    wrapping = {"compute_dtype": getattr(torch, options.compute_dtype)}
    if options.cpu_offload:
        wrapping["cpu_offload"] = xla_fsdp.CPUOffload(stream=options.stream)
    layers = {
        "attention": scaled_dot_product_attention,
        "cross_entropy": linear_cross_entropy if options.fused else gpt.linear_cross_entropy,
    }
    if options.sharding:  # from the file of --settings
        model = gpt.GPT(**sizes, join=partial(options.sharding.join, **wrapping), **layers)
        return options.sharding.wrap_root(model, **wrapping)

    offload = options.offload_activations
    wrap = partial(
        xla_fsdp.XlaFullyShardedDataParallel,
        reshard_after_forward=not options.no_reshard_after_forward,
        **wrapping,
    )

    def join(blocks: Iterable[nn.Module]) -> nn.Module:
        if options.scan_blocks:  # the loop recomputes blocks in the backward
            return xla_fsdp.scan_blocks(blocks, offload=offload, **wrapping)
        if options.checkpoint_activations or offload:
            blocks = (xla_fsdp.checkpoint_module(block, offload=offload) for block in blocks)
        return nn.Sequential(*(wrap(block) for block in blocks))

    return wrap(gpt.GPT(**sizes, join=join, **layers))


def train(
    index: int, options: SimpleNamespace, sizes: dict, parameters: int, prompt: list[int]
) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla  # not at the top of the file: launch must set up the runtime first
    import torch_xla.runtime as xr

    rank, world_size, length = xr.global_ordinal(), xr.world_size(), options.tokens_per_sample
    if not options.plan:
        require_for_training(parameters, "--arch")
    training_rows, held_out = tokens.open_rows(None if options.plan else options.data, length)

    torch.manual_seed(options.seed)  # the same weights on every rank
    with tuning.applied(options):
        model = build(options, sizes)
    # On the host, torch's fused kernel is fastest.
    optimizer, scheduler = optimize(model.parameters(), options, fused=options.cpu_offload or None)
    scaler = xla_fsdp.ShardedGradScaler(options.fp16_init_scale, enabled=options.fp16)
    evaluation.vary_by_rank(options.seed)

    network = {"kind": "gpt", **sizes}
    state = checkpoints.TrainingState(model, optimizer, scheduler, network)
    loaded = checkpoints.load(options, state, options.max_update)
    update, saved, sequences = 0, "", 0  # of earlier runs; the sequences are those of all ranks
    if loaded:
        update, saved, sequences = loaded.step, loaded.path, loaded.extra["sequences"]
        if loaded.extra["scaler"]:
            scaler.load_state_dict(loaded.extra["scaler"])

    steps_left = (options.max_update - update) * options.update_freq
    rows = tokens.training_batches(
        training_rows,
        options.batch_size,
        rank,
        world_size,
        seed=options.seed,
        done=sequences,
        batches=steps_left,
    )
    sequences_of_update = options.update_freq * options.batch_size * world_size
    meters = Updates(options, optimizer, scaler, tokens=sequences_of_update * length)
    preemption = xla_fsdp.Preemption(options.preemption_grace)
    batches = on_device(tokens.pairs(rows), options.prefetch)
    total_loss = 0.0
    with meters, preemption as preempted, batches as loader:
        for step, (numbers, labels) in enumerate(loader, 1):  # the next batch runs the step
            loss = model(numbers, labels) / options.update_freq
            scaler.scale(loss).backward()  # also averages the gradients over the ranks
            total_loss = total_loss + loss.detach()
            if step % options.update_freq:
                continue
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(options.clip_norm or float("inf"))
            scaler.step(optimizer)
            scaler.update()
            update += 1
            sequences += sequences_of_update
            is_last, must_end = update == options.max_update, preempted()
            show = is_last or update % options.log_steps == 0
            meters.update(update, total_loss, norm, show)
            total_loss = 0.0
            scheduler.step()
            optimizer.zero_grad()
            if is_last or update % options.validate_interval_updates == 0:
                meters.validated(update, *validate(options, model, held_out))
            if is_last or must_end or update % options.save_interval_updates == 0:
                saved = xla_fsdp.save_checkpoint(
                    options.ckpt_dir,
                    model,
                    optimizer,
                    scheduler,
                    step=update,
                    extra={
                        "network": network,
                        "sequences": sequences,
                        "scaler": scaler.state_dict(),
                    },
                    keep_last=options.keep_ckpts,
                )
            if must_end:  # the machine is preempted: --resume continues from here
                preempted.exit()
    if not steps_left:  # an earlier run ended after the last update
        meters.validated(update, *validate(options, model, held_out))

    if prompt:
        with evaluation.evaluating(model):
            completed = gpt.complete(
                model,
                prompt,
                options.sample_tokens,
                length,
                torch_xla.device(),
                options.temperature,
                options.seed,
                torch_xla.sync,
            )
    if rank == 0:  # joins the shards into one model, whose loss in plain torch must be the same
        if prompt:
            print(f"sample: {training_rows.found.tokenizer().decode(completed)!r}")
        data = tokens.describe(held_out, options.valid_samples, "pairs")
        joined = closing.consolidate(options, saved, network, data)
        closing.summarize("GPT, fully sharded", options, meters, saved, joined)


def validate(
    options: SimpleNamespace, model: nn.Module, held_out: tokens.Rows
) -> tuple[float, int]:
    """The loss of the held-out rows over all ranks, and the number of their tokens."""
    import torch_xla.runtime as xr

    rows = tokens.validation_batches(
        held_out, options.valid_samples, options.batch_size, xr.global_ordinal(), xr.world_size()
    )
    return evaluation.mean_loss(model, model, tokens.pairs(rows), options.prefetch)


if __name__ == "__main__":
    run(main)
