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
from common.schedules import polynomial
from common.script import DEFINE_number, Stop, exclude, fill_in, given, run
from networks import require_for_training
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from updates import Updates, betas

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


def main(options: SimpleNamespace) -> None:
    tuning.settle(options, *tuning.OF_BLOCKS.split())
    set_defaults(options)
    length = options.tokens_per_sample
    how = {"text": options.text, "tokenizer": options.tokenizer, "end_token": options.end_token}
    found = None if options.plan else tokens.prepare(options.data, length, **how)
    here = found.vocabulary if found else tokens.byte_level().get_vocab_size()
    fill_in(options, vocab_size=here if options.arch == "tiny" else gpt.VOCABULARY)
    if found and here > options.vocab_size:
        more = f"more than --vocab_size={options.vocab_size}"
        raise Stop(f"{found.folder} has a vocabulary of {here}, {more}", code=2)
    prompt = tokens.encode_prompt(found, options.prompt, length) if found else []
    # Large logits are computed in parts. The loop over the parts does not support float16.
    options.fused = options.vocab_size > 8192 and not options.fp16
    size = gpt.FAMILY[options.arch]
    network = {"vocabulary": options.vocab_size, "positions": options.positions, **size._asdict()}
    count = gpt.count_parameters(options.vocab_size, options.positions, size)
    checkpoints.prepare_folder(options)
    print(title := f"GPT {options.arch}, {count:,} parameters", flush=True)
    tuning.launch_plan_or_tune(train, (options, network, count, prompt), title)


def set_defaults(options: SimpleNamespace) -> None:
    """Sets defaults: of fairseq's run with 13 billion parameters, or for minutes on a CPU."""
    no_loop = ["no_reshard_after_forward", "nocheckpoint_activations", "stream"]
    exclude(options, "fp16", "compute_dtype")
    exclude(options, "scan_blocks", *no_loop)
    exclude(options, "offload_activations", "nocheckpoint_activations", "stream")
    exclude(options, "stream", "no_reshard_after_forward")
    fill_in(options, scan_blocks=not given(options, *no_loop), data=tokens.BYTES)
    fill_in(options, compute_dtype="float16" if options.fp16 else None)
    if options.arch == "tiny":
        fill_in(options, tokens_per_sample=64, positions=130, max_update=300, lr=3e-3)
        fill_in(options, warmup_updates=30, compute_dtype="float32", valid_samples=256)
    fill_in(options, tokens_per_sample=2048, positions=gpt.POSITIONS, max_update=10, lr=1e-4)
    fill_in(options, warmup_updates=5, compute_dtype="bfloat16")
    fill_in(options, total_num_update=options.max_update, checkpoint_activations=options.stream)
    if options.tokens_per_sample > options.positions:
        longer = f"--tokens_per_sample={options.tokens_per_sample} is longer than"
        raise Stop(f"{longer} the model's --positions={options.positions}", code=2)
    options.cpu_offload |= options.stream


def build(options: SimpleNamespace, network: dict) -> nn.Module:
    """Builds the model, and shards each block before the next one is created."""
    from xla_fsdp.layers import linear_cross_entropy, scaled_dot_product_attention

    where = xla_fsdp.CPUOffload(stream=options.stream) if options.cpu_offload else None
    how = {"compute_dtype": getattr(torch, options.compute_dtype), "cpu_offload": where}
    loss = linear_cross_entropy if options.fused else gpt.linear_cross_entropy
    layers = {"attention": scaled_dot_product_attention, "cross_entropy": loss}
    if settings := options.sharding:
        model = gpt.GPT(**network, join=partial(settings.join, **how), **layers)
        return settings.wrap_root(model, **how)
    offload, reshard = options.offload_activations, not options.no_reshard_after_forward
    wrap = partial(xla_fsdp.XlaFullyShardedDataParallel, reshard_after_forward=reshard, **how)

    def join(blocks: Iterable[nn.Module]) -> nn.Module:
        if options.scan_blocks:  # the loop recomputes blocks in the backward
            return xla_fsdp.scan_blocks(blocks, offload=offload, **how)
        if options.checkpoint_activations or offload:
            blocks = (xla_fsdp.checkpoint_module(block, offload=offload) for block in blocks)
        return nn.Sequential(*(wrap(block) for block in blocks))

    return wrap(gpt.GPT(**network, join=join, **layers))


def train(index: int, options: SimpleNamespace, network: dict, count: int, prompt: list) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla  # not at the top of the file: launch must set up the runtime first
    import torch_xla.runtime as xr

    rank, ranks, length = xr.global_ordinal(), xr.world_size(), options.tokens_per_sample
    if not options.plan:
        require_for_training(count, "--arch")
    torch.manual_seed(options.seed)  # the same weights on every rank
    with tuning.applied(options):
        model = build(options, network)
    how = {"betas": betas(options.adam_betas), "weight_decay": options.weight_decay}
    how |= {"lr": options.lr, "fused": options.cpu_offload or None}  # torch's fused CPU kernel
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    how = {"warmup": options.warmup_updates, "total": options.total_num_update}
    how |= {"power": options.power, "end": options.end_learning_rate / options.lr}
    scheduler = LambdaLR(optimizer, partial(polynomial, **how))
    scaler = xla_fsdp.ShardedGradScaler(options.fp16_init_scale, enabled=options.fp16)
    evaluation.vary_by_rank(options.seed)
    network, state = {"kind": "gpt", **network}, (model, optimizer, scheduler)
    loaded = checkpoints.load(options, options.ckpt_dir, state, network, options.max_update)
    update, saved, sequences = 0, "", 0
    if loaded:
        update, saved, sequences = loaded.step, loaded.path, loaded.extra["sequences"]
        if loaded.extra["scaler"]:
            scaler.load_state_dict(loaded.extra["scaler"])
    share, together = (options.batch_size, rank, ranks), options.batch_size * ranks
    rest = (options.max_update - update) * options.update_freq
    rows, held_out = tokens.open_rows(None if options.plan else options.data, length)
    how = {"seed": options.seed, "done": sequences, "batches": rest}
    batches = tokens.pairs(tokens.training_batches(rows, *share, **how))
    meters = Updates(options, optimizer, scaler, tokens=options.update_freq * together * length)
    watch, total = xla_fsdp.Preemption(options.preemption_grace), 0.0
    with meters, watch as preempted, on_device(batches, options.prefetch) as loader:
        for number, (numbers, labels) in enumerate(loader, 1):  # the next batch runs the step
            loss = model(numbers, labels) / options.update_freq
            scaler.scale(loss).backward()  # also averages the gradients over the ranks
            total = total + loss.detach()
            if number % options.update_freq:
                continue
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(options.clip_norm or float("inf"))
            scaler.step(optimizer)
            scaler.update()
            update, total, mean = update + 1, 0.0, total
            sequences += options.update_freq * together
            last, taken_away = update == options.max_update, preempted()
            meters.update(update, mean, norm, show=last or update % options.log_steps == 0)
            scheduler.step()
            optimizer.zero_grad()
            if last or update % options.validate_interval_updates == 0:
                meters.validated(update, *validate(model, options, held_out, share))
            if last or taken_away or update % options.save_interval_updates == 0:
                extra = {"network": network, "sequences": sequences, "scaler": scaler.state_dict()}
                how = {"step": update, "extra": extra, "keep_last": options.keep_ckpts}
                saved = xla_fsdp.save_checkpoint(options.ckpt_dir, *state, **how)
            if taken_away:  # --resume continues from here
                preempted.exit()
    if not rest:  # an earlier run ended after the last update
        meters.validated(update, *validate(model, options, held_out, share))
    if prompt:
        with evaluation.evaluating(model):
            how = (options.sample_tokens, length, torch_xla.device(), options.temperature)
            told = gpt.complete(model, prompt, *how, options.seed, torch_xla.sync)
    if rank == 0:  # joins the shards into one model, whose loss in plain torch must be the same
        if prompt:
            print(f"sample: {rows.found.tokenizer().decode(told)!r}")
        read = tokens.describe(held_out, options.valid_samples, "pairs")
        folder = closing.consolidate(options, saved, network, read)
        others = {"loss by frequencies alone": f"{tokens.loss_of_frequencies(rows.found):.4f}"}
        closing.summarize("GPT, fully sharded", options, meters, saved, folder, others)


def validate(model: nn.Module, options: SimpleNamespace, rows: tokens.Rows, share: tuple) -> tuple:
    """Returns the mean validation loss over all ranks, and the number of tokens."""
    batches = tokens.pairs(tokens.validation_batches(rows, options.valid_samples, *share))
    total, counted = 0, 0
    with evaluation.evaluating(model), on_device(batches, options.prefetch) as loader:
        for numbers, labels in loader:
            total = total + model(numbers, labels, reduction="sum")
            counted = counted + (labels != tokens.IGNORED).sum()
        counted = evaluation.over_all_ranks(counted)
        return evaluation.over_all_ranks(total) / counted, counted


if __name__ == "__main__":
    run(main)
