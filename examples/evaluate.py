"""Evaluates a consolidated model of an example in plain torch, without torch_xla.

    python examples/evaluate.py runs/mnist/ckpt_consolidated [--datadir DIR] [--batch_size 256]

The folder has safetensors files in ``weights``, and ``network.json`` with the arguments of
:func:`build`, and of :func:`test_images` or :func:`validation_loss`:
``{"network": {"kind": ..., ...}, "images" or "tokens": {...}}``. With --datadir the images or
tokens come from another folder. Prints one line of JSON.
"""

import argparse
import json
import os
import sys
from typing import Any

import digits
import images
import networks
import torch
import torch.nn.functional as F
from common import script
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset


def main(folder: str, datadir: str | None, batch_size: int, num_workers: int) -> None:
    model, described = load(folder)
    model.eval()
    if "tokens" in described:
        print(json.dumps(validation_loss(model, described["tokens"], datadir)))
    else:
        data = test_images(described["images"], datadir)
        correct = 0
        with torch.no_grad():
            for batch, labels in DataLoader(data, batch_size, num_workers=num_workers):
                correct += int((model(batch).argmax(dim=1) == labels).sum())
        accuracy = correct / len(data)
        print(json.dumps({"correct": correct, "images": len(data), "accuracy": accuracy}))
    assert "torch_xla" not in sys.modules


def load(folder: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the network with its weights, and the contents of ``network.json``."""
    weights_folder = os.path.join(folder, "weights")
    try:
        with open(os.path.join(folder, "network.json"), encoding="utf-8") as file:
            described = json.load(file)
        if described["network"]["kind"] == "llama":  # in the format of the Hugging Face hub
            os.environ["USE_TORCH_XLA"] = "0"  # otherwise transformers imports it
            from transformers.models.llama.modeling_llama import LlamaForCausalLM

            model = LlamaForCausalLM.from_pretrained(weights_folder, dtype=torch.float32)
            return model, described
        model, weights = build(**described["network"]), {}
        for name in sorted(os.listdir(weights_folder)):
            if name.endswith(".safetensors"):
                weights |= load_file(os.path.join(weights_folder, name))
        model.load_state_dict(weights)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise script.Stop(
            f"{folder} has no consolidated model of an example: {script.to_one_line(error)}", 2
        ) from error
    return model, described


def build(kind: str, **arguments: Any) -> nn.Module:
    """Builds the network, with random weights, of a ``kind``: mnist, vit, torchvision, gpt."""
    if kind == "mnist":
        from train_mnist import MnistNetwork

        return MnistNetwork()
    if kind == "vit":
        return networks.VisionTransformer(**arguments)
    if kind == "torchvision":
        return networks.torchvision_model(**arguments)
    if kind == "gpt":
        import gpt

        return gpt.GPT(**arguments)
    raise ValueError(f"unknown kind of network {kind!r}")


def validation_loss(
    model: nn.Module, described: dict[str, Any], folder: str | None
) -> dict[str, Any]:
    """The mean loss of the tokens that ``network.json`` describes, or of those in ``folder``."""
    import tokens

    found = tokens.open_folder(folder or described["folder"])
    rows = tokens.Rows(found, "valid", described["length"])
    batches = tokens.validation_batches(rows, described["count"], 8, 0, 1)
    if described["rows"] == "packed":
        batches = tokens.packed(batches, found.end)
    else:
        batches = tokens.pairs(batches)
    total, counted = 0.0, 0
    with torch.no_grad():
        for numbers, labels, *packed in batches:
            if packed:
                # Positions restart at each document. transformers uses this to separate documents,
                # but only without a cache of keys and values.
                logits = model(numbers, position_ids=packed[1], use_cache=False).logits
            else:
                logits = model(numbers)
            logits = logits.float().flatten(0, 1)
            total += F.cross_entropy(logits, labels.flatten(), reduction="sum").item()
            counted += int((labels != tokens.IGNORED).sum())
    return {"loss": total / counted, "tokens": counted}


def test_images(described: dict[str, Any], datadir: str | None) -> Dataset:
    """The images that ``network.json`` describes, from ``datadir`` if that is given."""
    arguments = dict(described)
    kind = arguments.pop("kind")
    if datadir is not None:
        arguments["datadir"] = datadir
    if kind == "mnist":
        arguments["fake"] = arguments["fake"] and datadir is None
        return digits.load(False, **arguments)
    if arguments["datadir"] is None:
        raise script.Stop(
            "the network was trained on fake images; give real ones with --datadir=DIR", code=2
        )
    return images.test_images(**arguments)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.error = lambda message: script.end(f"{message} (--help lists the flags)", 2)
    parser.add_argument("folder", nargs="*", help="folder with a consolidated model")
    parser.add_argument("--datadir", help="folder of images or tokens; default: as in training")
    parser.add_argument("--batch_size", type=int, default=256, help="images in a batch")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images")
    options = parser.parse_args(arguments)
    if len(options.folder) != 1:
        parser.error("give one folder with a consolidated model")
    if options.datadir == "":
        parser.error("--datadir=: is empty; give a folder")
    if options.batch_size < 1 or options.num_workers < 0:
        parser.error("--batch_size must be at least 1, --num_workers at least 0")
    return options


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    try:
        main(options.folder[0], options.datadir, options.batch_size, options.num_workers)
    except script.Stop as stop:
        script.end(stop.message, stop.code)
    except KeyboardInterrupt:
        script.end("interrupted", 130)
