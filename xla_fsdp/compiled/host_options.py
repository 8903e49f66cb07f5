"""What libtpu gets on a host of a given chip, whoever starts the ranks there.

``import torch_xla`` adds its flags to ``LIBTPU_INIT_ARGS`` and sets ``TPU_MEGACORE`` on v4; then
``xla_fsdp.launch`` adds its options. Neither replaces a flag.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..compiler_options import OPTIONS, accepted, libtpu_init_args
from ..tpu.chips import CHIPS, Chip
from ..tpu.libtpu_flags import ARGUMENTS, library, parse_arguments, with_last

MEGACORE = "TPU_MEGACORE"
# ``xla_fsdp.launch``; torch_xla's own launch; JAX or others without torch_xla.
LAUNCHERS = ("xla_fsdp", "torch_xla", "other")


@dataclass(frozen=True)
class HostOptions:
    """What libtpu reads when it starts.

    ``arguments``: ``LIBTPU_INIT_ARGS``. ``chip_config``: ``TPU_MEGACORE`` on v4, else None.
    ``whose``: who set each option, "LIBTPU_INIT_ARGS" for the user.
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
        further: options of ``plan`` alone, which take precedence.
        environ: what the user has set; default: this process's environment, as before ``import
            torch_xla``.
        libtpu: path of the libtpu that reads the options, or this environment's.

    Raises:
        ValueError: another launcher; libtpu refuses a value, or does not know one of ``further``.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}")
    given = dict(_of_the_user(os.environ) if environ is None else environ)
    user = parse_arguments(given.get(ARGUMENTS, ""))
    whose = dict.fromkeys(user, ARGUMENTS)
    if launcher != "other":
        given = torch_xla_environment(chip, given)
        whose = {**dict.fromkeys(parse_arguments(given.get(ARGUMENTS, "")), "torch_xla"), **whose}
    arguments = given.get(ARGUMENTS, "")
    if launcher == "xla_fsdp":
        arguments = libtpu_init_args(arguments, OPTIONS)
        whose = {**dict.fromkeys(OPTIONS, "xla_fsdp.launch"), **whose}
    if further:
        arguments = with_last(arguments, further)
        whose |= dict.fromkeys(further, "compiler_options")
    named = f"compiler_options, after {ARGUMENTS}" if further else ARGUMENTS
    arguments, unknown = accepted(arguments, libtpu, named)
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
    from .. import xlac  # it imports torch_xla

    return xlac.environment_after_import(environ, chip.generation)


def _of_the_user(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` less what torch_xla's import has added, at the end, on a TPU host."""
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
