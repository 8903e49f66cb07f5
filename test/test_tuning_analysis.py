"""What ``tune`` knows of a step without compiling it, against figures worked out by hand."""

import dataclasses
import itertools

import pytest
import torch
from on_ranks import raises, without_ranks
from test_tuning import AGAIN, GIB, INNER, ROWS, V3, WIDTH, Network, facts, small_step

from xla_fsdp import ShardingSettings, training_step
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.planning.tracing.units import OnWire
from xla_fsdp.planning.tuning.estimate import Estimates
from xla_fsdp.planning.tuning.facts import facts_of
from xla_fsdp.planning.tuning.repeated_blocks import find_blocks
from xla_fsdp.planning.tuning.search import what_would_fit, with_worthwhile_keeps
from xla_fsdp.planning.tuning.space import Space, neighbour_group_sizes
from xla_fsdp.tpu.topology import resolve

PLAIN = ShardingSettings()


@without_ranks
def test_a_traced_step_holds_and_computes_what_was_worked_out():
    def trace(settings):
        return trace_step(lambda: step(settings), 0, V3.devices, V3)

    step = small_step()
    found = facts_of(trace, V3.chip, V3.devices, ROWS)
    with pytest.raises(ValueError, match="the step shards nothing with xla_fsdp"):

        def unsharded(settings):
            model = Network(1).to("xla")
            model(torch.zeros(1, WIDTH).to("xla")).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

        facts_of(lambda s: trace_step(lambda: unsharded(s), 0, 8, V3), V3.chip, 8)

    rest, first, last = found.units
    assert (rest.name, first.name, last.name) == ("", "blocks.0", "blocks.1")
    assert [unit.is_block for unit in found.units] == [False, True, True]
    block = 2 * WIDTH * INNER + WIDTH + INNER
    assert first.elements == first.trainable == block and first.itemsize == 2
    parameters = sum(unit.elements for unit in found.units)
    assert parameters == 2 * block + WIDTH * WIDTH + WIDTH
    # Float32 parameter and two moments of AdamW; shards are padded a little.
    assert found.state == pytest.approx(12 * parameters, rel=0.02)
    assert found.inputs == pytest.approx(4 * ROWS * WIDTH, rel=0.01)
    # Of each block two weights, and two biases in one collective.
    weight, biases = OnWire(2 * WIDTH * INNER, INNER), OnWire(2 * 8 * 128 * 2, 8 * 2)
    assert weight in first.gathered and first.gathered == first.reduced and len(first.reduced) == 3
    assert first.reduced[0] == biases
    # Bfloat16: what goes into tanh, and what is added to the input. Tanh itself is fused.
    assert first.saved == pytest.approx(2 * ROWS * (INNER + WIDTH), rel=0.01)
    assert first.saved_recomputed == pytest.approx(2 * ROWS * WIDTH, rel=0.01)
    assert first.largest == 2 * ROWS * INNER
    (up,) = first.again
    assert (up.name, up.bytes) == ("up", 2 * ROWS * INNER) and first.again == last.again
    at_peak = ROWS * 2 * WIDTH * INNER / V3.chip.device_flops
    assert up.seconds == pytest.approx(at_peak) and up.seconds < first.forward
    at_peak = 2 * ROWS * 2 * WIDTH * INNER / V3.chip.device_flops
    assert at_peak < first.forward < 10 * at_peak


@without_ranks
def test_a_kernel_is_its_block_s_and_can_be_kept():
    from test_attention import Block

    def loss(model, settings):
        x = torch.zeros(settings.batch, 512, 128, device="xla", dtype=torch.bfloat16)
        return model(x).float().square().mean()

    def network():
        return torch.nn.Sequential(*(Block("auto") for _ in range(2)))

    step = training_step(network, loss, compute_dtype=torch.bfloat16)
    v5e = resolve("v5litepod-4")
    found = facts_of(lambda s: trace_step(lambda: step(s), 0, 4, v5e), v5e.chip, 4, 2)
    blocks = [unit for unit in found.units if unit.is_block]
    assert [unit.name for unit in blocks] == ["0", "1"]
    for unit in blocks:
        kernel, product = unit.again
        # Its result in bfloat16, (2, 2, 512, 64), and a float32 for each of 2 x 2 x 512 rows; that
        # the kernel writes each of these 128 times limits it, see test_attention.py.
        assert (kernel.name, kernel.bytes) == ("attention", 2 * 2 * 512 * (2 * 64 + 4))
        assert kernel.seconds == pytest.approx(5761 / v5e.chip.clock_hz)
        assert product.name == "qkv" and unit.forward > kernel.seconds + product.seconds


def estimates(slice_=V3, **changes):
    return Estimates({"blocks": facts(**changes)}, slice_)


def seconds(found, kind, tensors, ranks=8, routes="auto"):
    """Of the collectives that send ``tensors``."""
    return sum(map(found.links.seconds, found.links.parts(kind, tensors, ranks, routes)))


def test_memory_and_time_go_the_way_they_must():
    found = estimates()
    kept = found.of(PLAIN)
    more = [found.of(PLAIN.changed(recompute=how)) for how in ("none", 2, 4, "all")]
    for less, one in itertools.pairwise(more):
        assert less.hbm > one.hbm and less.compute < one.compute
    zero2 = found.of(PLAIN.changed(reshard_after_forward=False))
    half = found.of(PLAIN.changed(kept_blocks=4))
    assert zero2.hbm > half.hbm > kept.hbm
    assert zero2.exposed < half.exposed < kept.exposed
    assert zero2.compute == half.compute == kept.compute
    assert found.of(PLAIN.changed(recompute="all", offload=True)).hbm < more[-1].hbm
    shared = found.of(PLAIN.changed(shard_group_size=4))
    assert shared.state == pytest.approx(2 * kept.state, rel=0.01)
    twice = found.of(PLAIN.changed(batch=2))
    assert twice.hbm > kept.hbm and kept.compute < twice.compute < 2 * kept.compute
    assert twice.exposed == pytest.approx(kept.exposed)  # no gather is hidden on v3


def test_memory_by_hand():
    """Everything kept, eight blocks of 10^7 parameters, gathers one unit ahead."""
    found, step = estimates().of(PLAIN), facts()
    assert found.state == pytest.approx(
        (step.state + 4 * sum(unit.elements for unit in step.units)) / 8 + step.inputs
    )
    activations = 8 * GIB + GIB / 8 + 2 * GIB / 16
    full = 2 * 2 * 10**7 + 2 * 10**6 + 2 * 2 * 10**7
    assert found.hbm == pytest.approx(found.state + activations + full + 9 * (12 << 20))
    update = 2 * step.state / 8 / V3.chip.device_hbm_bandwidth
    assert found.compute == pytest.approx(3 * (8 * 5e-3 + 1e-3) + update)


def test_gathers_beside_compute_are_hidden_only_with_prefetch():
    found, loop = estimates(resolve("v5litepod-8")), PLAIN.changed(scan=True, recompute="all")
    gather = seconds(found, "all-gather", found.facts(PLAIN).blocks[0].gathered)
    for ahead, plain in (
        (PLAIN, PLAIN.changed(forward_prefetch=False, backward_prefetch="none")),
        (loop.changed(scan_prefetch=True), loop),
    ):
        hidden, shown = found.of(ahead), found.of(plain)
        # Of eight blocks forward and backward; before the last one's backward nothing computes.
        assert shown.exposed - hidden.exposed == pytest.approx(15 * gather)
        assert hidden.compute == pytest.approx(shown.compute)


def test_copies_to_the_host_are_exposed_where_they_take_longer_than_compute():
    kept = PLAIN.changed(recompute="all")
    # At 7.5 GB/s a core, a 16th of each of eight blocks: hidden, but for the last block's; or the
    # links are busy all the time, but for the last block's forward and the end.
    for held, least, most in ((GIB / 4, 0.9, 1.1), (8 * GIB, 13.7, 16)):
        found, copy = estimates(held=held), held / 16 / 7.5e9
        exposed = found.of(kept.changed(offload=True)).exposed - found.of(kept).exposed
        assert least < exposed / copy < most


def routes_tried(name, *tensors):
    """Ways of collectives that are tried on the best for units of such tensors."""
    where, step = resolve(name), facts()
    units = [dataclasses.replace(one, gathered=tensors, reduced=tensors) for one in step.units]
    step = dataclasses.replace(step, units=tuple(units))
    space, found = Space.of(step, where, (None,), True, {}), Estimates({"blocks": step}, where)
    return {one.collective_routes for one in space.around(PLAIN, found)} - {"auto"}


def test_ways_are_tried_that_one_gradient_at_least_takes():
    tiny, small, large = OnWire(2 << 20, 2**13), OnWire(150 << 20, 2**13), 200 << 20
    for name, *tensors, tried in (
        ("v5litepod-256", *[small] * 4, set()),  # around rows of 16 from 192 MiB on
        ("v5litepod-256", small, OnWire(large, 5 * 2**12), {"default"}),
        # Rings cut each of 16 parts in two: in stages, without rings.
        ("v5litepod-256", OnWire(large, 5 * 2**12 + 16), {"default"}),
        ("v5litepod-8", tiny, set()),  # elsewhere reduce-scatters are not split
        ("v6e-8", tiny, set()),
        ("v4-32", tiny, {"default"}),  # in stages (docs/design/communication.md)
    ):
        assert routes_tried(name, *tensors) == tried, (name, tensors)


def test_what_goes_around_rings_is_hidden_and_the_rest_is_not():
    where = resolve("v5litepod-256")
    small, large = OnWire(150 << 20, 2**13), OnWire(200 << 20, 5 * 2**12)
    step = facts(blocks=1)
    units = [dataclasses.replace(one, gathered=(), reduced=()) for one in step.units]

    def compute_and_exposed(*reduced, **changes):
        units[1] = dataclasses.replace(units[1], reduced=reduced)
        changed = dataclasses.replace(step, units=tuple(units))
        found = Estimates({"blocks": changed}, where).of(PLAIN.changed(**changes))
        return found.compute, found.exposed

    found = estimates(where)
    waited, around = (seconds(found, "reduce-scatter", (one,), 256) for one in (small, large))
    backward = 2 * units[1].forward
    alone, nothing = compute_and_exposed()
    assert nothing == 0.0
    # The chip adds up itself: of every byte it reads two and writes one.
    compute, exposed = compute_and_exposed(small, large)
    assert compute - alone == pytest.approx(3 * large.bytes / where.chip.device_hbm_bandwidth)
    assert exposed == pytest.approx(waited + max(around - backward, 0.0))
    # In the compiler's way no reduction runs beside compute, nor in groups of four ranks.
    compute, exposed = compute_and_exposed(small, large, collective_routes="default")
    assert compute == pytest.approx(alone) and exposed == pytest.approx(waited + around, rel=0.1)
    compute, exposed = compute_and_exposed(small, large, shard_group_size=4)
    assert compute == pytest.approx(compute_and_exposed(shard_group_size=4)[0]) and exposed > 0.0


def test_values_are_kept_that_save_most_for_a_byte():
    found, scanned = estimates(again=AGAIN), PLAIN.changed(scan=True, recompute="all")
    all_kept = scanned.changed(keep=("q", "up", "attention"))
    assert found.of(scanned).compute - found.of(all_kept).compute == pytest.approx(8 * 4e-3)
    assert found.of(all_kept).hbm - found.of(scanned).hbm == pytest.approx(8 * 9.5e6)
    plain = found.of(scanned).hbm

    def kept(capacity, settings=scanned, too_large=()):
        return with_worthwhile_keeps(settings, found, capacity, too_large).keep

    assert kept(plain + 8 * 9.6e6) == ("q", "up", "attention")
    assert kept(plain + 8 * 1.6e6) == ("q", "attention")
    assert kept(plain + 8 * 0.6e6) == ("attention",)
    assert kept(plain) == ()
    # Less than what was compiled and does not fit.
    assert kept(plain + 8 * 9.6e6, too_large=[all_kept]) == ("q", "attention")
    pair = scanned.changed(keep=("q", "attention"))
    assert kept(plain + 8 * 9.6e6, too_large=[all_kept, pair]) == ("attention",)
    smaller = all_kept.changed(batch=4)
    assert kept(plain + 8 * 9.6e6, too_large=[smaller]) == ("q", "up", "attention")
    # A loop that gathers ahead keeps none.
    assert kept(plain + 8 * 9.6e6, scanned.changed(scan_prefetch=True)) == ()
    offloaded = scanned.changed(offload=True)  # of a value that is kept HBM has that of all blocks
    more = found.of(offloaded.changed(keep=("q",))).hbm - found.of(offloaded).hbm
    assert more == pytest.approx(8 * 1e6)


def test_what_the_compiler_said_corrects_what_is_like_it():
    found, plain = estimates(), estimates()
    guessed = plain.of(PLAIN)
    hbm = guessed.state + (guessed.hbm - guessed.state) / 2
    found.learn(PLAIN, hbm, 2 * guessed.compute, guessed.exposed)
    corrected = found.corrected(PLAIN)
    assert (corrected.compute, corrected.exposed) == (2 * guessed.compute, guessed.exposed)
    assert corrected.hbm == pytest.approx(hbm) and found.of(PLAIN) == guessed
    assert found.knows(PLAIN) and not found.knows(PLAIN.changed(recompute="all"))
    other = PLAIN.changed(recompute="all")
    assert found.corrected(other).compute == pytest.approx(2 * plain.of(other).compute)
    # What differs from a known kind in ``keep`` only is corrected like it.
    loop = other.changed(scan=True)
    guessed = plain.of(loop)
    found.learn(loop, hbm, 3 * guessed.compute, guessed.exposed)
    for more in ({"keep": ("q",)}, {"scan_prefetch": True}):
        kept = loop.changed(**more)
        assert found.corrected(kept).compute == pytest.approx(3 * plain.of(kept).compute)
        assert not found.knows(kept)


def test_what_would_make_it_fit():
    huge, hbm = facts(held=100 * GIB, state=1000 * GIB), V3.chip.device_usable_hbm_bytes()
    advice = what_would_fit(PLAIN, Estimates({"blocks": huge}, V3), V3, hbm)
    assert "of 15.5 GiB a device" in advice[0]
    assert advice[-1].startswith("No v3 slice is large enough for this batch a device")
    batches = what_would_fit(
        PLAIN.changed(batch=16),
        Estimates({"blocks": facts(held=GIB).scaled(1)}, V3), V3, hbm,
    )  # fmt: skip
    assert any(one.startswith("A batch of ") for one in batches)
    state = facts(held=GIB / 100, state=200 * GIB)
    (_, slice_) = what_would_fit(PLAIN, Estimates({"blocks": state}, V3), V3, hbm)
    assert slice_.startswith("v3-32, with the same batch a device, would need ")


def test_the_space_has_no_candidate_twice_and_none_that_is_impossible():
    found = Space.of(facts(), V3, (4, 8), True, {}).main()
    assert len(set(found)) == len(found) > 50
    assert found[0] == PLAIN.changed(batch=4)
    assert not any(one.scan and one.recompute != "all" for one in found)
    assert {one.batch for one in found} == {4, 8}
    assert not any(one.scan for one in Space.of(facts(), V3, (None,), False, {}).main())
    for fixed, why in (
        ({"scan": (True,), "recompute": ("none",)}, "a loop recomputes each block"),
        ({"kept_blocks": (2,), "reshard_after_forward": (False,)}, "has no effect"),
    ):
        with pytest.raises(ValueError, match=f"search leaves no candidate .*{why}"):
            Space.of(facts(), V3, (None,), True, fixed).main()
    # Where gathers run beside compute, a loop may have them ahead.
    ahead = [one for one in found if one.scan_prefetch]
    v5e = Space.of(facts(), resolve("v5litepod-8"), (4,), True, {}).main()
    assert not ahead and any(one.scan_prefetch for one in v5e)
    assert all(one.scan for one in v5e if one.scan_prefetch)
    assert neighbour_group_sizes(V3) == (4,)
    assert neighbour_group_sizes(resolve("2xv5litepod-16")) == (4, 16)


def test_more_vmem_for_operations_is_tried_on_the_best_where_products_gain():
    for name, tried in (("v3-8", set()), ("v4-8", set()), ("v5p-8", {49152}), ("v6e-8", {98304})):
        where = resolve(name)
        estimates = Estimates({"blocks": facts()}, where)
        space = Space.of(facts(), where, (4,), True, {})
        for best in (PLAIN, PLAIN.changed(scan=True, recompute="all")):
            around = space.around(best, estimates)
            assert {one.scoped_vmem_kib for one in around} - {None} == tried, name
            assert sum(one.scoped_vmem_kib is not None for one in around) == len(tried)


def test_blocks_are_found():
    from torch import nn

    network = Network(3)
    assert find_blocks(network) == list(network.blocks) == find_blocks(network, "blocks")
    assert find_blocks(network, {nn.Linear})[0] is network.first
    assert find_blocks(nn.Linear(2, 2)) == []
    for blocks, error, message in (
        ("layers", ValueError, "blocks='layers': Network has no such.*lists are blocks"),
        ("first", ValueError, "blocks='first' is a Linear; it must be"),
        ({nn.Conv2d}, ValueError, "blocks=Conv2d: Network has no module of these classes"),
        ([3], TypeError, "blocks must be the name"),
    ):
        raises(error, message, find_blocks, network, blocks)
