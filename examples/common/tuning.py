"""``--tune SLICE`` searches the fastest sharding of a run, and ``--settings FILE`` stores it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from absl import flags

import xla_fsdp
from xla_fsdp.compiler_options import add_to_environment

from .launching import call_as_rank, launch_or_plan, refusals
from .script import Stop, exclude, require, to_one_line

NOT_TUNED = ("stream", "lora_rank")
flags.DEFINE_string(
    "tune",
    None,
    "search the fastest sharding of this run on a TPU slice, e.g. v3-8, instead of running it; "
    "needs no TPU. Exit code 0 if a sharding fits into memory, 3 if none does",
)
flags.DEFINE_integer("tune_budget", 8, "maximum number of compilations of --tune", lower_bound=1)
flags.DEFINE_list("tune_batch", [], "batch sizes of a device for --tune, e.g. 8,16,32")
flags.DEFINE_string("settings", None, "file with the sharding settings; --tune writes it")
require("tune", bool, "must name a slice, such as v3-8")
require("settings", bool, "is empty; give a file")
require(
    "tune_batch",
    lambda sizes: all(size.strip().isdecimal() and int(size) for size in sizes),
    "must be numbers from 1 on, separated by commas",
)


def read_settings(options: SimpleNamespace, *others: str) -> bool:
    """Reads ``--settings`` into ``options.sharding``; returns whether there are any.

    Sets ``options.batch_size`` if the settings have a batch size.

    ``others``: flags that also choose the sharding, and so exclude settings.
    """
    options.sharding = None
    exclude(options, "tune", "plan")
    if options.tune_batch and not options.tune:
        raise Stop("--tune_batch needs --tune", code=2)
    given = "--tune" if options.tune else "--settings" if options.settings else ""
    if options.tune:  # the other flags make the step that --tune compares with
        others = tuple(name for name in others if name in NOT_TUNED)
    others = [name for name in others if flags.FLAGS[name].present]
    if given and others:
        raise Stop(f"{given} excludes --{others[0]}", code=2)
    if options.tune:
        options.plan = options.tune  # as with --plan, nothing is trained, saved or downloaded
    elif options.settings:
        with applied(options):
            options.sharding = xla_fsdp.ShardingSettings.load(options.settings)
        options.batch_size = options.sharding.batch or options.batch_size
        add_to_environment(options.sharding.compiler_options)
    return given == "--settings"


@contextmanager
def applied(options: SimpleNamespace) -> Iterator[None]:
    """A context in which errors of ``--settings`` end the script with one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not options.settings:
            raise
        raise Stop(f"--settings={options.settings}: {to_one_line(error)}", code=2) from error


def launch_plan_or_tune(train: Callable, args: tuple, title: str) -> None:
    """Calls ``launch_or_plan``; with ``--tune``, searches the settings for ``train(rank, *args)``.

    ``train`` shards as in ``options.sharding``. If no settings fit, the script ends with code 3.
    """
    options: SimpleNamespace = args[0]
    if not options.tune:
        return launch_or_plan(train, args, title)

    def step(settings: xla_fsdp.ShardingSettings) -> None:
        # tune handles errors of settings that the model does not support.
        chosen = SimpleNamespace(**{**vars(options), "sharding": settings, "settings": None})
        chosen.batch_size = settings.batch or options.batch_size
        call_as_rank(train, chosen, *args[1:])

    batch = [int(size) for size in options.tune_batch] or None
    # The flags determine the caller's own step, its batch too.
    baseline = None if batch else partial(call_as_rank, train, *args)
    with refusals("--tune", options):
        found = xla_fsdp.tune(
            step,
            options.tune,
            batch=batch,
            baseline=baseline,
            budget=options.tune_budget,
            title=title,
            calibration=options.calibration,
        )
    print(found)
    if found.settings is None and not (found.own and found.own.fits):
        raise Stop(str(found).splitlines()[0], code=3)
    if found.settings is None:
        print("no settings are saved: the same command without --tune is fastest")
    elif options.settings:
        with applied(options):
            found.settings.save(options.settings)
        print(f"saved to {options.settings}: the same command with --settings instead of --tune")
