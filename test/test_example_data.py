"""The images that the examples train on, the same whoever reads them, and learning rates."""

import os
import random
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import EXAMPLES
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from torchvision import transforms


def test_images_depend_on_seed_and_epoch_only(common):
    """test_example_images.py reads them in processes, too."""
    data = [(float(place), 0) for place in range(12)]

    def epoch(number, rank=0, ranks=1, seed=1):
        """The images, and a random number for each."""
        loader = common.sampling.training_batches(
            data, rank, ranks, 6 // ranks, seed=seed,
            transform=lambda image, draw: torch.tensor([image, draw.random()]),
        )  # fmt: skip
        loader.sampler.set_epoch(number)
        return torch.cat([images for images, _ in loader])

    state = torch.get_rng_state()
    first, second = epoch(0), epoch(1)
    assert sorted(first[:, 0].tolist()) == list(range(12))
    for other in (second, epoch(0, seed=2)):
        assert not torch.equal(first.sort(0).values, other.sort(0).values)
    assert torch.equal(epoch(1), second)
    halves = [epoch(1, rank, 2) for rank in range(2)]
    assert torch.equal(torch.stack(halves, dim=1).flatten(0, 1), second)
    # What a rank saves as its random state is not drawn from.
    assert torch.equal(torch.get_rng_state(), state)


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
    for mean in (torch.mean, torch.std):
        torch.testing.assert_close(mean(found, 0), mean(expected, 0), atol=1, rtol=0)

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


@pytest.mark.parametrize("ranks, size, batches", [(1, 1000, 1), (4, 1000, 1), (4, 8, 10)])
def test_every_held_out_image_counts_once(common, ranks, size, batches):
    data = [(torch.zeros(1), label) for label in range(297)]
    shares = [common.sampling.test_batches(data, rank, ranks, size) for rank in range(ranks)]
    labels = [[labels for _, labels in share] for share in shares]
    assert {len(share) for share in labels} == {batches}
    assert {len(batch) for share in labels for batch in share} == {min(size, -(-297 // ranks))}
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

    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(common.script.Stop, match="cannot be written to .*other: Permission"):
        common.digits.write(str(tmp_path / "other"))


def rates_of(factor, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = LambdaLR(optimizer, factor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found, optimizer.param_groups[0]["lr"]


def test_steps_down_as_published(common):
    factor = partial(common.schedules.steps_down, warmup=5 * 10, every=30 * 10, divisor=10)
    rates, _ = rates_of(factor, 1000)
    assert rates[0] == pytest.approx(0.4 / 50) and rates[24] == pytest.approx(0.2)
    for epoch, rate in ((5, 0.4), (29, 0.4), (30, 0.04), (60, 0.004), (99, 0.0004)):
        assert rates[epoch * 10] == pytest.approx(rate)


@pytest.mark.parametrize("warmup, divisor", [(2, 1e200), (2_000_000, 1e308)])
def test_the_rate_is_never_nought_nor_too_small_to_compute(common, warmup, divisor):
    factor = partial(common.schedules.steps_down, warmup=warmup, every=2, divisor=divisor)
    rates, _ = rates_of(factor, 10)
    assert all(0 < rate < 1e-29 for rate in rates[2:])


def test_half_a_cosine_to_nought(common):
    rates, after = rates_of(partial(common.schedules.half_cosine, warmup=10, total=110), 110)
    assert rates[9] == rates[10] == pytest.approx(0.4) and rates[60] == pytest.approx(0.2)
    assert min(rates) > 0 and after == pytest.approx(0, abs=1e-12)


def test_the_decay_is_that_of_fairseq(common):
    factor = partial(common.schedules.polynomial, warmup=5, total=25, end=0.1)
    linear = [factor(step, power=1.0) for step in (0, 4, 5, 15, 25, 99)]
    assert linear == pytest.approx([0.2, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert factor(15, power=2.0) == pytest.approx(0.1 + 0.9 / 4)


def test_goes_on_by_epochs_and_as_the_flags_say_now(common):
    """Epochs of 20 steps, and after the second, on half the ranks, of 40; another rate."""

    def factor(steps):
        return partial(common.schedules.half_cosine, warmup=steps, total=5 * steps)

    def optimizer(lr, momentum):
        parameter = torch.nn.Parameter(torch.zeros(1))
        return torch.optim.SGD([parameter], lr=lr, momentum=momentum)

    before = optimizer(0.4, 0.9)
    schedule = LambdaLR(before, factor(20))
    for _ in range(2 * 20):
        before.step()
        schedule.step()
    after = optimizer(0.1, 0.8)
    then = LambdaLR(after, factor(40))
    given = common.schedules.settings(after)
    after.load_state_dict(before.state_dict())
    then.load_state_dict(schedule.state_dict())
    common.schedules.resume(after, then, given, 2 * 40)
    found = []
    for _ in range(3 * 40):
        found.append(after.param_groups[0]["lr"])
        after.step()
        then.step()
    whole, _ = rates_of(factor(40), 5 * 40)
    assert found == pytest.approx([rate / 4 for rate in whole[2 * 40 :]])
    assert after.param_groups[0]["momentum"] == 0.8
