"""Fine-tunes BERT to detect pairs of sentences with the same meaning, with Accelerate.

    python -m xla_fsdp.integrations.launch --config_file examples/accelerate/fsdp.yaml \\
        examples/train_pairs.py                        # 4 CPU ranks; on a TPU VM all of its chips
    python examples/train_pairs.py                     # one process, nothing sharded

By default, a small untrained BERT learns generated pairs in the format of MRPC, a corpus of GLUE.
--data_dir=MRPC --model=bert-base-cased trains on the corpus. The config file has the sharding, the
dtype and the number of ranks. --batch_size is that of all ranks together. The order of the data
depends only on the seed, not on the number of ranks.
"""

import argparse
import json
import zipfile
from pathlib import Path

import pairs
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

import xla_fsdp


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", help="MRPC's train.tsv and dev.tsv; default: generated")
    parser.add_argument("--model", help="model for from_pretrained; default: a small one")
    parser.add_argument("--output_dir", default="runs/pairs", help="folder that all hosts share")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs in a step, of all ranks")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_length", type=int, help="tokens; default: 40, with --data_dir 128")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, help="default: 1e-3, with --model 2e-5")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=2000, help="to generate; a fifth for tests")
    parser.add_argument("--checkpointing_steps", type=int, help="steps between checkpoints")
    parser.add_argument("--resume_from_checkpoint", help="step_N, or latest (if there is one)")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if args.data_dir:
        try:
            for part in pairs.FILES:
                pairs.path_of(args.data_dir, part)
        except ValueError as error:
            parser.error(f"--data_dir: {error}")
    resumed = args.resume_from_checkpoint
    if resumed not in (None, "latest") and not Path(resumed).is_dir():
        parser.error(f"--resume_from_checkpoint: there is no folder {resumed}")
    if args.max_length is None:
        args.max_length = 128 if args.model or args.data_dir else 40
    if args.lr is None:
        args.lr = 2e-5 if args.model else 1e-3
    return args


def main() -> None:
    """Trains the model; the launcher calls this on every rank."""
    args = arguments()
    output = Path(args.output_dir)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # All ranks together have the batches of one process, so the schedule has the same steps.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed
        ),
    )
    set_seed(args.seed)
    checkpoint = checkpoint_of(args)
    tokenizer, train_data, dev_data = load_data(args, accelerator, is_new=checkpoint is None)
    # A smaller last batch would need another program, so drop it.
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True, drop_last=True)
    dev_loader = DataLoader(dev_data, args.batch_size)

    model = build(args, tokenizer)
    optimizer = torch.optim.AdamW(groups(model), lr=args.lr)
    updates = len(train_loader) * args.epochs // args.gradient_accumulation_steps
    scheduler = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    model, optimizer, train_loader, dev_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, dev_loader, scheduler
    )

    steps_done = 0
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        steps_done = steps_of(checkpoint)
    results: list[dict] = []
    with xla_fsdp.Preemption() as preempted:
        for epoch in range(steps_done // len(train_loader), args.epochs):
            model.train()
            train_loader.set_epoch(epoch)
            batches, losses = train_loader, []
            if begun := steps_done % len(train_loader):  # saved within this epoch
                batches = accelerator.skip_first_batches(train_loader, begun)
                batches.set_epoch(epoch)
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())  # read after the epoch, so that no step waits for it
                steps_done += 1
                # The machine is preempted: --resume_from_checkpoint=latest continues from here.
                must_end = accelerator.sync_gradients and preempted()
                interval = args.checkpointing_steps
                if must_end or interval and steps_done % interval == 0:
                    accelerator.save_state(str(output / f"step_{steps_done}"))
                if must_end:
                    preempted.exit()
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            result = {"epoch": epoch, "loss": mean, **evaluate(accelerator, model, dev_loader)}
            results.append(result)
            if accelerator.is_main_process:
                shown = "epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}, F1 {f1:.3f}"
                print(shown.format(**result), flush=True)

    # Every rank calls it. The first one gets the full state, on the host if it was sharded.
    state = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.unwrap_model(model).save_pretrained(
        output / "model",
        state_dict=state,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output / "model")
        (output / "results.json").write_text(json.dumps(results), encoding="utf-8")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def load_data(
    args: argparse.Namespace, accelerator: Accelerator, is_new: bool
) -> tuple[PreTrainedTokenizerBase, list[dict], list[dict]]:
    """The tokenizer, and encoded pairs for training and tests.

    A run that ``is_new`` generates the data and the tokenizer, if the flags name no others.
    """
    output = Path(args.output_dir)
    folder, words = args.data_dir or str(output / "data"), args.model or str(output / "tokenizer")
    if accelerator.is_main_process and is_new:
        if args.data_dir is None:
            pairs.write(folder, args.pairs, args.pairs // 5)
        if args.model is None:
            pairs.word_pieces(pairs.read(folder, "train")).save_pretrained(words)
    accelerator.wait_for_everyone()
    tokenizer = AutoTokenizer.from_pretrained(words)
    train_data = pairs.encoded(pairs.read(folder, "train"), tokenizer, args.max_length)
    dev_data = pairs.encoded(pairs.read(folder, "dev"), tokenizer, args.max_length)
    return tokenizer, train_data, dev_data


def checkpoint_of(args: argparse.Namespace) -> str | None:
    """The folder of ``--resume_from_checkpoint``; None if ``latest`` finds no checkpoint."""
    if args.resume_from_checkpoint != "latest":
        return args.resume_from_checkpoint
    saved = filter(is_complete, Path(args.output_dir).glob("step_*"))
    return max(map(str, saved), key=steps_of, default=None)


def is_complete(folder: Path) -> bool:
    """Whether the save is complete. Its last file is the manifest or, if nothing is sharded, the
    zip file of the random states, which ends with a list of its contents."""
    if (folder / "xla_fsdp").is_dir():
        return xla_fsdp.latest_checkpoint(folder / "xla_fsdp") is not None
    whole = zipfile.is_zipfile(folder / "random_states_0.pkl")
    return whole and (folder / "model.safetensors").exists()


def steps_of(folder: str) -> int:
    return int(Path(folder).name.removeprefix("step_"))


def build(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Builds ``--model``, or a model with two layers of width 64."""
    if args.model:
        return AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    config = BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=args.max_length,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    return BertForSequenceClassification(config)


def groups(model: nn.Module, decay: float = 0.01) -> list[dict]:
    """Parameter groups, without weight decay for biases and norms."""
    spared = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(spared)], "weight_decay": decay},
        {"params": [p for n, p in named if n.endswith(spared)], "weight_decay": 0.0},
    ]


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> dict[str, float]:
    """Accuracy and F1 of "same meaning", the metrics of GLUE for MRPC."""
    model.eval()
    seen = []
    for batch in loader:
        with torch.no_grad():
            chosen = model(**batch).logits.argmax(dim=-1)
        # Removes examples that Accelerate has repeated to fill the last batch.
        both = accelerator.gather_for_metrics((chosen, batch["labels"]))
        seen.append(torch.stack(both).cpu())
    chosen, labels = torch.cat(seen, dim=1).bool()
    hits, of_same = int((chosen & labels).sum()), int(chosen.sum()) + int(labels.sum())
    accuracy = (chosen == labels).double().mean().item()
    return {"accuracy": accuracy, "f1": 2 * hits / of_same if of_same else 0.0}


if __name__ == "__main__":
    main()
