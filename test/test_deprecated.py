"""Public names of the last release: each works, warns, and excludes the new one."""

import json

import pytest

import xla_fsdp
from xla_fsdp import ShardingSettings, compiler_options, deprecated
from xla_fsdp.planning.reporting.report import Report
from xla_fsdp.planning.tuning.space import checked_search

SHARED, VMEM = ShardingSettings(shard_group_size=8), ShardingSettings(scoped_vmem_kib=49152)


REPORT = Report.__new__(Report)
SAVED = SHARED.to_json().replace("shard_group_size", "shard_ranks")
# Old name, how it is used, and what the new name gives.
USES = [
    ("latest", lambda: xla_fsdp.latest, xla_fsdp.latest_checkpoint),
    ("loaded_later", lambda: xla_fsdp.loaded_later, xla_fsdp.defer_init),
    (
        "for_large_products",
        lambda: compiler_options.for_large_products("v6e"),
        {"xla_tpu_scoped_vmem_limit_kib": "98304"},
    ),
    ("beside", lambda: REPORT.beside.__func__, Report.compare_trace),
    ("shard_ranks", lambda: ShardingSettings(shard_ranks=8), SHARED),
    ("shard_ranks", lambda: ShardingSettings().changed(shard_ranks=8), SHARED),
    ("shard_ranks", lambda: SHARED.shard_ranks, 8),
    ("shard_ranks", lambda: checked_search({"shard_ranks": [8]}), {"shard_group_size": (8,)}),
    ("shard_ranks", lambda: ShardingSettings.from_json(SAVED), SHARED),
    ("operation_vmem", lambda: ShardingSettings(operation_vmem=49152), VMEM),
    ("operation_vmem", lambda: VMEM.operation_vmem, 49152),
]
NEW = {old: new for names in deprecated.RENAMED.values() for old, new in names.items()}


@pytest.mark.parametrize("old, use, expected", USES)
def test_old_name_does_what_the_new_one_does_and_warns(old, use, expected):
    with pytest.warns(DeprecationWarning, match=f"'{old}' is .* Use '{NEW[old]}'") as warned:
        assert use() == expected
    assert [one.filename for one in warned] == [__file__]


def test_every_renamed_name_is_used_in_the_table():
    assert {old for old, *_ in USES} == set(NEW)


@pytest.mark.parametrize(
    "use",
    [
        lambda: ShardingSettings(shard_ranks=8, shard_group_size=8),
        lambda: ShardingSettings().changed(operation_vmem=1, scoped_vmem_kib=1),
        lambda: checked_search({"shard_ranks": [8], "shard_group_size": [8]}),
        lambda: ShardingSettings.from_json(
            json.dumps({**json.loads(SHARED.to_json()), "shard_ranks": 8})
        ),
    ],
)
def test_old_and_new_name_together_raise(use):
    with pytest.raises(TypeError, match="got both '.*' and '.*', which is its old name. Pass"):
        use()


@pytest.mark.parametrize("owner", [xla_fsdp, compiler_options, SHARED])
def test_unknown_names_raise_as_before(owner):
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        owner.nothing  # noqa: B018
