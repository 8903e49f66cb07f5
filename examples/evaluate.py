"""Evaluates what an example has consolidated, in plain torch, without torch_xla.

    python examples/evaluate.py runs/mnist/ckpt_consolidated [--datadir DIR] [--batch_size 256]

The folder says which network it is and how its images are read: safetensors files are in
``weights``, and beside them ``network.json`` has what :func:`build` and :func:`test_images` need,
``{"network": {"kind": ..., ...}, "images": {...}}``. --datadir reads the images from somewhere
else. Prints one line of JSON.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import digits
import images
import networks
import torch
from common import script
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset


def main(folder: str, datadir: str | None, batch_size: int, num_workers: int) -> None:
    model, described = load(folder)
    data = test_images(described, datadir)
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch, labels in DataLoader(data, batch_size, num_workers=num_workers):
            correct += int((model(batch).argmax(dim=1) == labels).sum())
    assert "torch_xla" not in sys.modules
    accuracy = correct / len(data)
    print(json.dumps({"correct": correct, "images": len(data), "accuracy": accuracy}))


def load(folder: str) -> tuple[nn.Module, Any]:
    """The network with its weights, and how its images are to be read."""
    try:
        with open(os.path.join(folder, "network.json"), encoding="utf-8") as file:
            described = json.load(file)
        network, read = described["network"], described["images"]
        model = build(**network)
        weights, place = {}, os.path.join(folder, "weights")
        for name in sorted(os.listdir(place)):
            if name.endswith(".safetensors"):
                weights |= load_file(os.path.join(place, name))
        model.load_state_dict(weights)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        reason = script.in_a_line(error)
        raise script.Stop(
            f"{folder} has no consolidated model of an example: {reason}", 2
        ) from error
    return model, read


def build(kind: str, **arguments: Any) -> nn.Module:
    """The network with random weights: of ``kind`` ``mnist``, ``vit`` or ``torchvision``."""
    if kind == "mnist":
        from train_mnist import MnistNetwork

        return MnistNetwork()
    if kind == "vit":
        return networks.VisionTransformer(**arguments)
    if kind == "torchvision":
        return networks.torchvision_model(**arguments)
    raise script.Stop(f"unknown kind of network {kind!r}; mnist, vit and torchvision are known", 2)


def test_images(described: Any, datadir: str | None) -> Dataset:
    """What a ``network.json`` says under ``images``, read from ``datadir`` if that is given."""
    unknown = "network.json does not say how images are read"
    if not isinstance(described, dict):
        raise script.Stop(f"{unknown}: it has {described!r:.60}", code=2)
    if datadir is not None:
        described = described | {"datadir": datadir}
        if "fake" in described:
            described["fake"] = False
    try:
        if described["kind"] == "folders" and described["datadir"] is None:
            fake = "the network was trained on fake images: --datadir=DIR names real ones"
            raise script.Stop(fake, code=2)
        return _read(**described)
    except (TypeError, ValueError, KeyError) as error:
        reason = script.in_a_line(error)
        raise script.Stop(f"{unknown}: {reason}", code=2) from error


def _read(
    kind: str, datadir: str | None, classes: Sequence[str] | None = None, **arguments: Any
) -> Dataset:
    if kind == "mnist":
        return digits.load(False, datadir, **arguments)
    if kind == "folders":
        return images.test_images(datadir, classes, **arguments)
    raise script.Stop(f"unknown kind of images {kind!r}; mnist and folders are known", code=2)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.error = lambda message: script.end(f"{message} (--help lists the flags)", 2)
    parser.add_argument("folder", nargs="*", help="with a consolidated model")
    parser.add_argument("--datadir", help="folder of the images; default: that of the training")
    parser.add_argument("--batch_size", type=int, default=256, help="images at a time")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images")
    options = parser.parse_args(arguments)
    if len(options.folder) != 1:
        parser.error("name one folder with a consolidated model")
    if options.datadir == "":
        parser.error("--datadir=: is empty; name a folder")
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
