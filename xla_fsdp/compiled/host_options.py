"""What the TPU compiler gets on a host of a given chip, whoever starts the ranks there.

Before a line of the user's code runs on a TPU host, ``import torch_xla`` adds its flags to
``LIBTPU_INIT_ARGS`` where it has none of that name, and on v4 sets ``TPU_MEGACORE``. Then
``xla_fsdp.launch`` adds those of :mod:`xla_fsdp.tpu.compiler_options`, before what is there, where
it has none of that name. libtpu reads the result when it starts. A plan hands libtpu the same
string, so that it compiles the program that runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..tpu.chips import CHIPS, Chip
from ..tpu.compiler_options import OPTIONS, accepted, libtpu_init_args
from ..tpu.libtpu_flags import ARGUMENTS, library, read, with_last

MEGACORE = "TPU_MEGACORE"
# Who starts the ranks: ``xla_fsdp.launch``; torch_xla's own launch, or a separate program
# around its collectives; something that does not import torch_xla, such as JAX.
LAUNCHERS = ("xla_fsdp", "torch_xla", "other")


@dataclass(frozen=True)
class HostOptions:
    """What libtpu reads when it starts.

    ``arguments``: ``LIBTPU_INIT_ARGS``. ``chip_config``: how the cores of a chip make one device,
    ``TPU_MEGACORE`` on v4; None where the chip has no such choice. ``whose``: who set each option
    that ``arguments`` names, "LIBTPU_INIT_ARGS" for the user.
    """

    arguments: str
    chip_config: str | None = None
    whose: Mapping[str, str] = field(default_factory=dict)


def host_options(
    chip: Chip,
    launcher: str = "xla_fsdp",
    further: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    libtpu: str | None = None,
) -> HostOptions:
    """What the compiler gets on a host with ``chip``.

    Args:
        launcher: one of :data:`LAUNCHERS`.
        further: options that are to count more than all others, asked for by ``plan`` alone.
        environ: what the user has set; default: this process's environment, less what
            ``import torch_xla`` has added to it if this is a TPU host.
        libtpu: path of the libtpu that reads the options; default: that of this environment.

    Raises:
        ValueError: another launcher; libtpu refuses a value, or does not know one of ``further``.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}")
    given = dict(_of_the_user(os.environ) if environ is None else environ)
    user = read(given.get(ARGUMENTS, ""))
    whose = dict.fromkeys(user, ARGUMENTS)
    if launcher != "other":
        given = torch_xla_environment(chip, given)
        whose = {**dict.fromkeys(read(given.get(ARGUMENTS, "")), "torch_xla"), **whose}
    arguments = given.get(ARGUMENTS, "")
    if launcher == "xla_fsdp":
        arguments = libtpu_init_args(arguments, OPTIONS)
        whose = {**dict.fromkeys(OPTIONS, "xla_fsdp.launch"), **whose}
    if further:
        arguments = with_last(arguments, further)
        whose |= dict.fromkeys(further, "compiler_options")
    arguments, unknown = accepted(arguments, libtpu)
    if wrong := set(further or ()).intersection(unknown):
        dashes = any(name.startswith("-") for name in wrong)
        raise ValueError(
            f"compiler_options names {', '.join(sorted(wrong))}, which this libtpu does not "
            f"know ({libtpu or library()}); "
            f"{'write names without dashes' if dashes else 'leave them out'}"
        )
    config = None
    if chip.chip_config is not None:
        config = given.get(MEGACORE) or chip.chip_config
    return HostOptions(arguments, config, whose)


def torch_xla_environment(chip: Chip, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` as importing the installed torch_xla leaves it on a host with ``chip``."""
    from .. import xlac  # not at the top of the file: it imports torch_xla

    return xlac.environment_after_import(environ, chip.generation)


def _of_the_user(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` less what torch_xla's import has added, at the end, if this is a TPU host."""
    from .. import xlac

    user = dict(environ)
    if xlac.chips_of_host() == 0:
        return user
    added: set[str] = set()
    for chip in CHIPS.values():
        theirs = torch_xla_environment(chip, {})
        added.update(theirs[ARGUMENTS].split())
        if MEGACORE in theirs and user.get(MEGACORE) == theirs[MEGACORE]:
            del user[MEGACORE]
    words = user.get(ARGUMENTS, "").split()
    while words and words[-1] in added:
        words.pop()
    return {**user, ARGUMENTS: " ".join(words)}
