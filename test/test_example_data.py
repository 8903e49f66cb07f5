"""The images that the examples train on: the same in every run, whoever reads them."""

import os
import random
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES
from PIL import Image
from torchvision import transforms


@pytest.fixture
def loader(common, tmp_path):
    """``loader(rank, world_size, workers, seed)``: batches of twelve images in two classes."""
    generator = torch.Generator().manual_seed(0)
    for index in range(12):
        place = tmp_path / "train" / str(index % 2) / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (24, 20, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(place)
    data = common.images.training_images(str(tmp_path))
    vary = common.images.RandomCrop(16)

    def make(rank=0, world_size=1, workers=0, seed=1, batch_size=6):
        how = {}
        if workers:
            how = {"num_workers": workers, "persistent_workers": True}
            how["multiprocessing_context"] = "forkserver"
        return common.sampling.training_batches(
            data, rank, world_size, batch_size // world_size, seed=seed, transform=vary, **how
        )

    return make


def epoch(loader, number):
    loader.sampler.set_epoch(number)
    return torch.cat([images for images, _ in loader])


@pytest.mark.full
def test_images_depend_on_seed_and_epoch_only(loader):
    states = torch.get_rng_state(), random.getstate()
    plain = loader()
    first, second = epoch(plain, 0), epoch(plain, 1)
    assert len(first) == 12 and not torch.equal(first.sort(0).values, second.sort(0).values)
    assert not torch.equal(epoch(loader(seed=2), 0), first)
    # Resumed after the first epoch, in this process or by others, which live on.
    assert torch.equal(epoch(loader(), 1), second)
    several = loader(workers=2)
    assert torch.equal(epoch(several, 0), first) and torch.equal(epoch(several, 1), second)
    assert torch.equal(epoch(loader(workers=1), 1), second)
    # On two ranks.
    halves = [epoch(loader(rank, 2), 1) for rank in range(2)]
    assert torch.equal(torch.stack(halves, dim=1).flatten(0, 1), second)
    # What a rank saves as its random state is not drawn from.
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_parts_are_chosen_as_torchvision_does(common):
    draw = random.Random(1)
    image = Image.new("RGB", (100, 60))
    ours = common.images.RandomCrop(16)
    theirs = transforms.RandomResizedCrop(16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts = [theirs.get_params(image, theirs.scale, theirs.ratio) for _ in range(4000)]
    expected = torch.tensor(parts, dtype=torch.float32)
    found = torch.tensor([ours.choose(100, 60, draw) for _ in range(4000)], dtype=torch.float32)
    # Means and deviations of top, left, height and width, in pixels.
    torch.testing.assert_close(found.mean(0), expected.mean(0), atol=1, rtol=0)
    torch.testing.assert_close(found.std(0), expected.std(0), atol=1, rtol=0)

    for width, height in ((200, 10), (10, 200), (1, 1000), (1000, 1)):
        narrow = Image.new("RGB", (width, height))
        middle = transforms.RandomResizedCrop.get_params(narrow, [0.9, 1.0], [3 / 4, 4 / 3])
        part = common.images.RandomCrop(16, min_crop=0.9)
        assert part.choose(width, height, draw) == middle
    mirrored = set()
    image = Image.fromarray(torch.arange(16, dtype=torch.uint8).expand(16, 16).numpy(), "L")
    for _ in range(20):
        shown = common.images.RandomCrop(16, min_crop=0.99)(image.convert("RGB"), draw)
        assert shown.shape == (3, 16, 16)
        mirrored.add(bool(shown[0, 0, 0] > shown[0, 0, -1]))
    assert mirrored == {True, False}


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_large_test_batch_reads_every_image_once(common, ranks):
    data = [(torch.zeros(1), label) for label in range(297)]
    shares = [common.sampling.test_batches(data, rank, ranks, 100_000) for rank in range(ranks)]
    labels = [[labels for _, labels in share] for share in shares]
    assert {len(batch) for share in labels for batch in share} == {-(-297 // ranks)}
    found = torch.cat([batch for share in labels for batch in share])
    assert found[found >= 0].sort().values.tolist() == list(range(297))
    # A quick look at fake images reads no more than there would be.
    fake = common.images.FakeImages
    assert [len(fake("val", 8, 10, count)) for count in (None, 100, 10**6)] == [50000, 100, 50000]


def test_cpu_ranks_share_the_cores(run_script):
    done = run_script(
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import image_batches\n"
        "import torch_xla.runtime as xr\n"
        "def workers(kind, ranks, cores, wish=None):\n"
        "    xr.device_type, xr.world_size = lambda: kind, lambda: ranks\n"
        "    os.sched_getaffinity = lambda _: range(cores)\n"
        "    how = image_batches.reading(wish)\n"
        "    return how.get('num_workers', 0), how.get('multiprocessing_context')\n"
        "for case in (('CPU', 4, 2), ('CPU', 4, 16), ('CPU', 1, 64), ('CPU', 4, 2, 3),\n"
        "             ('TPU', 8, 96), ('TPU', 256, 96)):\n"
        "    print(*workers(*case))\n",
        EXAMPLES,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0 None", "2 forkserver", "4 forkserver", "3 forkserver", "4 None", "4 None",
    ]  # fmt: skip


@pytest.mark.slow
def test_two_first_starts_may_write_the_digits(common, tmp_path, monkeypatch):
    folder, rename = tmp_path / "digits", os.rename

    def second(source, target):
        if not folder.exists():
            (folder / "train").mkdir(parents=True)
        rename(source, target)

    monkeypatch.setattr(os, "rename", second)
    assert common.digits.write(str(folder)) == str(folder)
    assert os.listdir(tmp_path) == ["digits"]

    def fails(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", fails)
    other = Path(tmp_path, "other")
    with pytest.raises(common.script.Stop, match="cannot be written to .*other: Permission"):
        common.digits.write(str(other))
