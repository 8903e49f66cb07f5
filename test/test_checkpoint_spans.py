"""The manifest says by a rule who holds what: a load opens only the files that it needs."""

import checkpoint_files as files
import pytest
import torch
from checkpoint_runs import WRAPPINGS, Run
from zoo import Zoo

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import save_checkpoint
from xla_fsdp.checkpoint.loading import Reader, prepare
from xla_fsdp.checkpoint.rank_exchange import RankExchange
from xla_fsdp.consolidate.errors import CoverageError, InvalidMetadataError
from xla_fsdp.consolidate.format.manifest import ShardingRule
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint


def _save_all(rank, size, folder):
    return {kind: Run(kind, rank, size).save(f"{folder}/{kind}", 1) for kind in WRAPPINGS}


def _replicas(rank, size, folder):
    """Two replicas of two shards: which files a rank opens to load what it saved."""
    torch.manual_seed(0)
    model = FSDP(
        Zoo(),
        sharding_groups=[[0, 1], [2, 3]],
        sharding_rank=rank % 2,
        sharding_world_size=2,
        replication_groups=[[0, 2], [1, 3]],
    )
    checkpoint = ShardedCheckpoint(save_checkpoint(folder, model, step=1))
    prepare(Reader(checkpoint, RankExchange()), model, None, None, True, False)
    return sorted(checkpoint._files)


def test_a_rule_is_what_the_files_say(run_ranks, tmp_path):
    for path in run_ranks(_save_all, 3, 3, str(tmp_path))[0].values():
        checkpoint, once = ShardedCheckpoint(path), ShardedCheckpoint(path)
        for name, tensor in checkpoint.manifest.parameters.items():
            rule = checkpoint.manifest.sharding_rules[name]
            by_rule = list(rule.pieces(tensor.numel, 0, tensor.numel))
            assert by_rule == checkpoint.pieces(name), (path, name)
            if tensor.numel:
                whole = checkpoint.read(name, 0, tensor.numel)
                part = once.read(name, tensor.numel // 2, tensor.numel)
                assert torch.equal(part, whole[tensor.numel // 2 :])
        fresh = ShardedCheckpoint(path)
        fresh.read(next(iter(checkpoint.manifest.parameters)), 0, 1)
        assert len(fresh._files) == 1
    parameters = checkpoint.manifest.parameters
    name = max(parameters, key=lambda name: parameters[name].numel)  # more than a shard
    with files.forged(path) as body:
        right = body["spans"][name]
        body["spans"][name] = [3, 1, right[2], right[3]]  # ranks 3, 4, ...
    with pytest.raises(CoverageError, match="says that rank 3 has elements 0 to .*3 ranks"):
        ShardedCheckpoint(path).read(name, 0, 1)
    for wrong in ([0, 1, 0, 0], [0, 0, 5, 0], [0, 1, 5], [0, 1, -5, 0], [0, 1, 5, True], "all"):
        with files.forged(path) as body:
            body["spans"][name] = wrong
        with pytest.raises(InvalidMetadataError, match="the span of"):
            ShardedCheckpoint(path)
    with files.forged(path) as body:
        body["spans"][name] = [0, 1, right[2] + 1, right[3]]
    for look in (lambda c: c.read(name, 0, 1), lambda c: c.verify()):
        with pytest.raises(CoverageError, match="the manifest says"):
            look(ShardedCheckpoint(path))
    with files.forged(path) as body:
        del body["spans"][name]
    with pytest.raises(InvalidMetadataError, match="the span of .* is None"):
        ShardedCheckpoint(path)
    with files.forged(path) as body:
        del body["spans"]  # as earlier versions wrote it
    ShardedCheckpoint(path).verify()


def test_a_replica_opens_its_own_file_and_that_with_its_shard(run_ranks, tmp_path):
    assert run_ranks(_replicas, 4, 4, str(tmp_path)) == [[0], [1], [0, 2], [1, 3]]


def test_spans():
    # A vector of 100 and 60 elements in shards of 64, of ranks 1, 3, 5.
    first, second = ShardingRule(1, 2, 64, 0), ShardingRule(1, 2, 64, 100)
    assert list(first.pieces(100, 0, 100)) == [(0, 64, 1), (64, 100, 3)]
    assert list(second.pieces(60, 0, 60)) == [(0, 28, 3), (28, 60, 5)]
    assert list(second.pieces(60, 28, 29)) == [(28, 60, 5)] and not list(second.pieces(60, 5, 5))
    assert [second.range_of_rank(rank, 60) for rank in range(7)] == [
        (0, 0), (0, 0), (0, 0), (0, 28), (0, 0), (28, 60), (0, 0)
    ]  # fmt: skip
