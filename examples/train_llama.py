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

from types import SimpleNamespace

import llama
import tokens
import torch
from absl import flags
from common import checkpoints, closing, evaluation, tuning
from common.batches import on_device
from common.script import Stop, fill_in, run
from networks import require_for_training
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from updates import Updates, optimize

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
    tuning.read_settings(options, "scan_blocks", "keep", "offload_activations", "lora_rank")
    set_defaults(options)
    positions = options.positions or options.tokens_per_sample
    if options.make_folder:
        config = llama.new(options.size, options.vocab_size, positions, None)
        return llama.make_folder(options.make_folder, config, options.seed)

    tokenizer = llama.tokenizer_of(options.folder)
    data = None if options.plan else tokens.prepare(options, tokenizer)
    if options.folder:
        config = llama.of_folder(options.folder)
    else:
        config = llama.new(options.size, options.vocab_size, positions, data)
    llama.require_fit(config, options.tokens_per_sample, tokenizer, data)
    prompt = tokens.encode_prompt(data, options) if data else []
    checkpoints.prepare_folder(options)
    parameters = llama.count_parameters(config, options.keep)
    title = f"LLaMA, {parameters:,} parameters"
    print(title, flush=True)
    tuning.launch_plan_or_tune(train, (options, config, parameters, prompt), title)


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
    sharding = xla_fsdp.ShardingSettings(
        scan=options.scan_blocks,
        keep=tuple(options.keep),
        recompute="all",
        offload=options.offload_activations,
    )
    fill_in(options, sharding=sharding)  # unless it comes from the file of --settings


def build(
    options: SimpleNamespace, config: LlamaConfig, sharding: xla_fsdp.ShardingSettings, new: bool
) -> nn.Module:
    """Builds the model, sharded by ``sharding``. If it is ``new``, its weights are initialized."""
    model = inner = llama.without_values(config)
    if options.lora_rank:
        model = llama.with_adapters(inner, options.lora_rank)
    wrapping = {
        "compute_dtype": getattr(torch, options.compute_dtype),
        # Initializes each submodule when it is sharded.
        "param_init_fn": llama.initializer(model, inner, new),
    }
    inner.model.layers = sharding.join(inner.model.layers, ignore=["layer_idx"], **wrapping)
    if not config.tie_word_embeddings:
        embedding = inner.model.embed_tokens
        inner.model.embed_tokens = xla_fsdp.XlaFullyShardedDataParallel(embedding, **wrapping)
    model = sharding.wrap_root(model, **wrapping)
    xla_fsdp.register_fsdp_forward_method(model, "loss")
    return model


def train(
    index: int, options: SimpleNamespace, config: LlamaConfig, parameters: int, prompt: list[int]
) -> None:
    """Trains the model; each rank runs this function."""
    import torch_xla.runtime as xr  # not at the top of the file: launch sets up the runtime

    rank, world_size, length = xr.global_ordinal(), xr.world_size(), options.tokens_per_sample
    if not options.plan:
        require_for_training(parameters, "--size")
    training_rows, held_out = tokens.open_rows(None if options.plan else options.data, length)

    torch.manual_seed(options.seed)  # the same weights on every rank
    with tuning.applied(options):
        model = build(options, config, options.sharding, new=not options.folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, scheduler = optimize(trained, options)
    evaluation.vary_by_rank(options.seed)

    network = llama.describe(config, options.lora_rank)
    state = checkpoints.TrainingState(model, optimizer, scheduler, network)
    loaded = checkpoints.load(options, state, options.max_update)
    update, saved, sequences = 0, "", 0  # of earlier runs; the sequences are those of all ranks
    if loaded:
        update, saved, sequences = loaded.step, loaded.path, loaded.extra["sequences"]

    end = training_rows.found.end
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
    meters = Updates(options, optimizer, tokens=sequences_of_update * length)
    if options.folder and not loaded and not options.plan:
        llama.load(model, options.folder)
        meters.validated(0, *validate(options, model, held_out))  # before the training
    preemption = xla_fsdp.Preemption(options.preemption_grace)
    batches = on_device(tokens.packed(rows, end), options.prefetch)
    total_loss = 0.0
    with meters, preemption as preempted, batches as loader:
        for step, packed in enumerate(loader, 1):  # the next batch runs the step
            loss = model.loss(*packed) / options.update_freq
            loss.backward()  # also averages the gradients over the ranks
            total_loss = total_loss + loss.detach()
            if step % options.update_freq:
                continue
            norm = model.clip_grad_norm_(options.clip_norm or float("inf"))
            optimizer.step()
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
                    extra={"network": network, "sequences": sequences},
                    keep_last=options.keep_ckpts,
                )
            if must_end:  # the machine is preempted: --resume continues from here
                preempted.exit()
    if not steps_left:  # an earlier run ended after the last update
        meters.validated(update, *validate(options, model, held_out))

    if prompt:
        completed = complete(model, options, config, prompt, update)
    joined = closing.folder_of(options, saved)
    if joined and options.lora_rank:  # all ranks write these folders
        model.save_pretrained(f"{joined}/adapter")
        save_merged(model, f"{joined}/weights")
    if rank == 0:  # joins the shards into one model, whose loss in plain torch must be the same
        if prompt:
            print(f"sample: {training_rows.found.tokenizer().decode(completed)!r}")
        if joined:
            data = tokens.describe(held_out, options.valid_samples, "packed")
            closing.describe(joined, network, data)
            if not options.lora_rank:
                llama.remove_hub_files(f"{joined}/weights")
                closing.consolidate(options, saved, network, data)
            llama.add_hub_files(f"{joined}/weights", config, training_rows.found)
        closing.summarize("LLaMA, fully sharded", options, meters, saved, joined)


def validate(
    options: SimpleNamespace, model: nn.Module, held_out: tokens.Rows
) -> tuple[float, int]:
    """The loss of the held-out rows over all ranks, and the number of their tokens."""
    import torch_xla.runtime as xr

    rows = tokens.validation_batches(
        held_out, options.valid_samples, options.batch_size, xr.global_ordinal(), xr.world_size()
    )
    packed = tokens.packed(rows, held_out.found.end)
    return evaluation.mean_loss(model, model.loss, packed, options.prefetch)


def complete(
    model: nn.Module, options: SimpleNamespace, config: LlamaConfig, prompt: list[int], update: int
) -> list[int]:
    """The prompt, and tokens generated by the model as saved after ``update`` updates."""
    # A loop has no cache of keys and values: use single blocks, with the same weights.
    singly = options.sharding.changed(scan=False, scan_prefetch=False, keep=())
    if options.sharding != singly:
        model = build(options, config, singly, new=False)
        xla_fsdp.load_checkpoint(options.ckpt_dir, model, restore_rng=False, step=update)
    with evaluation.evaluating(model):
        return llama.generate(
            model, prompt, config, options.sample_tokens, options.temperature, options.seed
        )


if __name__ == "__main__":
    run(main)
