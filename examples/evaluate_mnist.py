"""Evaluates a consolidated checkpoint of train_mnist.py in plain torch, without torch_xla.

    python examples/evaluate_mnist.py runs/mnist/ckpt_consolidated.pth [--datadir DIR]

Prints one line of JSON.
"""

import argparse
import json
import sys

import torch
from common import mnist_data
from common.mnist_network import MnistNetwork
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--datadir", help="MNIST in torchvision's layout; default: the digits")
    parser.add_argument("--fake_data", action="store_true")
    arguments = parser.parse_args()

    model = MnistNetwork()
    model.load_state_dict(torch.load(arguments.checkpoint, weights_only=True)["model"])
    model.eval()
    data = mnist_data.load(False, arguments.datadir, arguments.fake_data)
    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(data, 256, collate_fn=lambda batch: batch):
            correct += int((model(images).argmax(dim=1) == labels).sum())
    assert "torch_xla" not in sys.modules
    accuracy = correct / len(data)
    print(json.dumps({"correct": correct, "images": len(data), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
