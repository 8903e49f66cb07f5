"""Trains a LLaMA model on text, fully sharded: from scratch or pretrained, all weights or LoRA.

    python examples/train_llama.py                        # a tiny one on 4 ranks of any CPU
    python examples/train_llama.py --folder=runs/llama/ckpt_consolidated/weights --lora_rank=8 \\
        --data=runs/mine --text=mine --ckpt_dir=runs/lora/ckpt    # adapters for it, on other text
    python examples/train_llama.py --size=8B --plan=v5p-128       # a plan without a TPU, and tuned:
    python examples/train_llama.py --size=8B --tune=v5p-128 --settings=8B.json
    PJRT_DEVICE=TPU python examples/train_llama.py --folder=/shared/llama --data=/shared/tokens \\
        --ckpt_dir=/shared/run --resume                   # on every host of a pod: examples/pod/

A row of --tokens_per_sample tokens contains several documents; a token attends only to its own. The
loss never stores all logits. Blocks run as one loop, unless they have adapters. The consolidated
model has the format of the Hugging Face hub. --batch_size is that of one rank.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import llama
import tokens
import torch
from absl import flags
from common import checkpoints, closing, evaluation, tuning
from common.batches import on_device
from common.schedules import polynomial
from common.script import Stop, fill_in, run
from networks import require_for_training
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from updates import Updates, betas

import xla_fsdp
from xla_fsdp.integrations.peft import save_merged

flags.DEFINE_enum("size", "tiny", list(llama.SIZES), "size of a new model")
flags.DEFINE_string("folder", None, "pretrained model: config.json and safetensors files")
flags.DEFINE_string("make_folder", None, "only write an untrained model of --size to this folder")
flags.DEFINE_integer("lora_rank", 0, "train only adapters of this rank; 0: all", lower_bound=0)
flags.DEFINE_integer("vocab_size", None, f"default: {llama.VOCABULARY}; tiny: that of --data", 1)
flags.DEFINE_integer("positions", None, "of a new model; default: tokens_per_sample", 1)
DTYPES = ["float32", "bfloat16"]
flags.DEFINE_enum("compute_dtype", None, DTYPES, "default: bfloat16, tiny: float32")
flags.DEFINE_bool("offload_activations", False, "store inputs of blocks on the host")
flags.DEFINE_list("keep", [], "not recomputed in the backward: attention, self_attn.q_proj, ...")
flags.DEFINE_bool("scan_blocks", None, "run blocks as one compiled loop; default: without LoRA")
flags.DEFINE_string("ckpt_dir", "runs/llama/ckpt", "folder of the checkpoints, shared by all hosts")


def main(options: SimpleNamespace) -> None:
    tuning.settle(options, "scan_blocks", "keep", "offload_activations", "lora_rank")
    set_defaults(options)
    length = options.tokens_per_sample
    new = partial(llama.new, options.size, options.vocab_size, options.positions or length)
    if options.make_folder:
        return llama.make_folder(options.make_folder, new(None), options.seed)
    words = llama.tokenizer_of(options.folder)
    how = {"text": options.text, "tokenizer": options.tokenizer, "end_token": options.end_token}
    found = None if options.plan else tokens.prepare(options.data, length, **how, default=words)
    config = llama.of_folder(options.folder) if options.folder else new(found)
    llama.require_fit(config, length, words, found)
    prompt = tokens.encode_prompt(found, options.prompt, length) if found else []
    checkpoints.prepare_folder(options)
    count = llama.count_parameters(config, options.keep)
    print(title := f"LLaMA, {count:,} parameters", flush=True)
    tuning.launch_plan_or_tune(train, (options, config, count, prompt), title)


def set_defaults(options: SimpleNamespace) -> None:
    """Sets defaults: of a large model, or for minutes of training on a CPU."""
    if options.size == "tiny":
        fill_in(options, tokens_per_sample=128, compute_dtype="float32", valid_samples=128, lr=3e-3)
    fill_in(options, tokens_per_sample=2048 if options.size == "1B" else 8192, lr=3e-4)
    fill_in(options, compute_dtype="bfloat16", max_update=300, warmup_updates=30, data=tokens.BYTES)
    fill_in(options, total_num_update=options.max_update, scan_blocks=not options.lora_rank)
    if options.lora_rank and (options.scan_blocks or not options.folder):
        raise Stop("--lora_rank needs --folder, and excludes --scan_blocks", code=2)
    if options.keep and not options.scan_blocks:
        raise Stop("--keep needs scanned blocks; leave it out, or set --scan_blocks", code=2)
    if options.folder and (options.vocab_size or options.positions or options.make_folder):
        raise Stop("--folder excludes --vocab_size, --positions and --make_folder", code=2)
    loop = {"scan": options.scan_blocks, "keep": tuple(options.keep)}
    how = {"recompute": "all", "offload": options.offload_activations}
    fill_in(options, sharding=xla_fsdp.ShardingSettings(**loop, **how))


def build(options: SimpleNamespace, config: Any, sharding: Any, new: bool) -> nn.Module:
    """Builds the model, sharded as flags or --settings say; ``new``: whether to initialize it."""
    model = inner = llama.without_values(config)
    if options.lora_rank:
        model = llama.with_adapters(inner, options.lora_rank)
    begin = llama.beginning(model, inner, new)  # initializes each submodule when it is sharded
    how = {"compute_dtype": getattr(torch, options.compute_dtype), "param_init_fn": begin}
    inner.model.layers = sharding.join(inner.model.layers, ignore=["layer_idx"], **how)
    if not config.tie_word_embeddings:
        embedding = inner.model.embed_tokens
        inner.model.embed_tokens = xla_fsdp.XlaFullyShardedDataParallel(embedding, **how)
    model = sharding.wrap_root(model, **how)
    xla_fsdp.register_fsdp_forward_method(model, "loss")
    return model


def train(index: int, options: SimpleNamespace, config: Any, count: int, prompt: list) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla.runtime as xr  # not at the top of the file: launch sets up the runtime

    rank, ranks, length = xr.global_ordinal(), xr.world_size(), options.tokens_per_sample
    if not options.plan:
        require_for_training(count, "--size")
    torch.manual_seed(options.seed)  # the same weights on every rank
    with tuning.applied(options):
        model = build(options, config, options.sharding, new=not options.folder)
    how = {"betas": betas(options.adam_betas), "weight_decay": options.weight_decay}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, **how)
    how = {"warmup": options.warmup_updates, "total": options.total_num_update}
    how |= {"power": options.power, "end": options.end_learning_rate / options.lr}
    scheduler = LambdaLR(optimizer, partial(polynomial, **how))
    evaluation.vary_by_rank(options.seed)
    network, state = llama.known_by(config, options.lora_rank), (model, optimizer, scheduler)
    loaded = checkpoints.load(options, options.ckpt_dir, state, network, options.max_update)
    update, saved, sequences = 0, "", 0
    if loaded:
        update, saved, sequences = loaded.step, loaded.path, loaded.extra["sequences"]
    share, together = (options.batch_size, rank, ranks), options.batch_size * ranks
    rest = (options.max_update - update) * options.update_freq
    rows, held_out = tokens.open_rows(None if options.plan else options.data, length)
    how = {"seed": options.seed, "done": sequences, "batches": rest}
    batches = tokens.packed(tokens.training_batches(rows, *share, **how), rows.found.end)
    meters = Updates(options, optimizer, tokens=options.update_freq * together * length)
    if options.folder and not loaded and not options.plan:
        llama.load(model, options.folder)  # the loss before the training
        meters.validated(0, *validate(model, options, held_out, share))
    watch, total = xla_fsdp.Preemption(options.preemption_grace), 0.0
    with meters, watch as preempted, on_device(batches, options.prefetch) as loader:
        for number, packed in enumerate(loader, 1):  # the next batch runs the step
            loss = model.loss(*packed) / options.update_freq
            loss.backward()  # also averages the gradients over the ranks
            total = total + loss.detach()
            if number % options.update_freq:
                continue
            norm = model.clip_grad_norm_(options.clip_norm or float("inf"))
            optimizer.step()
            update, total, mean = update + 1, 0.0, total
            sequences += options.update_freq * together
            last, taken_away = update == options.max_update, preempted()
            meters.update(update, mean, norm, show=last or update % options.log_steps == 0)
            scheduler.step()
            optimizer.zero_grad()
            if last or update % options.validate_interval_updates == 0:
                meters.validated(update, *validate(model, options, held_out, share))
            if last or taken_away or update % options.save_interval_updates == 0:
                how = {"step": update, "extra": {"network": network, "sequences": sequences}}
                how |= {"keep_last": options.keep_ckpts}
                saved = xla_fsdp.save_checkpoint(options.ckpt_dir, *state, **how)
            if taken_away:  # --resume continues from here
                preempted.exit()
    if not rest:  # an earlier run ended after the last update
        meters.validated(update, *validate(model, options, held_out, share))
    if prompt:
        single, loop = model, {"scan": False, "scan_prefetch": False, "keep": ()}
        singly = options.sharding.changed(**loop)
        if options.sharding != singly:  # a loop has no cache of keys and values: use single blocks
            single = build(options, config, singly, new=False)
            xla_fsdp.load_checkpoint(options.ckpt_dir, single, restore_rng=False, step=update)
        with evaluation.evaluating(single):
            how = (options.sample_tokens, options.temperature, options.seed)
            told = llama.generate(single, prompt, config, *how)
    folder = closing.folder_of(options, saved)
    if folder and options.lora_rank:
        model.save_pretrained(f"{folder}/adapter")
        save_merged(model, f"{folder}/weights")
    if rank == 0:  # joins the shards into one model, whose loss in plain torch must be the same
        if prompt:
            print(f"sample: {rows.found.tokenizer().decode(told)!r}")
        if folder:
            read = tokens.describe(held_out, options.valid_samples, "packed")
            closing.describe(folder, network, read)
            if not options.lora_rank:
                llama.reopen_folder(f"{folder}/weights")
                closing.consolidate(options, saved, network, read)
            llama.complete_folder(f"{folder}/weights", config, rows.found)
        others = {"loss by frequencies alone": f"{tokens.loss_of_frequencies(rows.found):.4f}"}
        closing.summarize("LLaMA, fully sharded", options, meters, saved, folder, others)


def validate(model: nn.Module, options: SimpleNamespace, rows: tokens.Rows, share: tuple) -> tuple:
    """Returns the mean validation loss over all ranks, and the number of tokens."""
    batches = tokens.validation_batches(rows, options.valid_samples, *share)
    batches, total, counted = tokens.packed(batches, rows.found.end), 0, 0
    with evaluation.evaluating(model), on_device(batches, options.prefetch) as loader:
        for packed in loader:
            total = total + model.loss(*packed, reduction="sum")
            counted = counted + (packed[1] != tokens.IGNORED).sum()
        counted = evaluation.over_all_ranks(counted)
        return evaluation.over_all_ranks(total) / counted, counted


if __name__ == "__main__":
    run(main)
