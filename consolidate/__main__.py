"""Command line: ``python -m xla_fsdp.consolidate``.

Only the line that reports the result goes to stdout. Exit codes: 0 for written, up to date or
verified; 2 for wrong usage or a CheckpointError; 130 for interrupted.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from .errors import CheckpointError, OptionsError
from .legacy.source import OUTPUT_NAME
from .stream.options import DTYPES, FORMATS
from .stream.run import consolidate_checkpoint as run
from .stream.run import reshard_checkpoint, verify_checkpoint
from .stream.sources import LEGACY_SUFFIX
from .stream.stage import silent


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.ckpt_prefix is None:  # checked here, after misspelt options were named
        parser.error("the following arguments are required: --ckpt_prefix")
    try:
        print(_execute(arguments))
    except CheckpointError as error:
        # File names and messages of libraries may have line breaks.
        message = str(error).replace("\r", "\\r").replace("\n", "\\n")
        print(f"{type(error).__name__}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


def _execute(arguments: argparse.Namespace) -> str:
    prefix, save_path = arguments.ckpt_prefix, arguments.save_path
    common: dict[str, Any] = {
        "suffix": arguments.ckpt_suffix,
        "allow_unsafe_pickle": arguments.allow_unsafe_pickle,
        "progress": _bar if arguments.progress or sys.stderr.isatty() else silent,
    }
    converts = "format", "max_shard_size", "dtype"
    if arguments.verify:
        _require_unused(arguments, "--verify writes nothing", "save_path", "reshard",
                        "optimizer", "tied", *converts)  # fmt: skip
        return verify_checkpoint(prefix, **common)
    tied: dict[str, str] = {}
    for alias, name in arguments.tied:
        if tied.setdefault(alias, name) != name:
            raise OptionsError(
                f"--tied says that {alias!r} is {tied[alias]!r} and {name!r}. Remove one of them."
            )
    common |= {"tied": tied, "say": partial(print, file=sys.stderr)}
    options = {name: getattr(arguments, name) for name in converts}
    if arguments.reshard is None:
        result = run(prefix, save_path, optimizer=arguments.optimizer, **options, **common)
    else:
        why = "--reshard does not convert a checkpoint, and decides itself what is in it"
        _require_unused(arguments, why, "optimizer", *converts)
        result = reshard_checkpoint(prefix, arguments.reshard, save_path, **common)
    if result.up_to_date:
        return f"up to date: {result.path}"
    kept = f", {result.resumed} files kept from an earlier run" if result.resumed else ""
    return (
        f"wrote {result.path}: {result.parameters} parameters"
        f" ({result.elements} elements), {result.bytes} bytes{kept}"
    )


def _require_unused(arguments: argparse.Namespace, why: str, *names: str) -> None:
    """Raises OptionsError, with the reason ``why``, if one of the options ``names`` was given."""
    if used := [f"--{name}" for name in names if getattr(arguments, name)]:
        given = ", ".join(used)
        raise OptionsError(f"{why}, so it cannot be used with {given}. Remove {given}.")


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(
        total=total, desc=what, disable=not total, unit="B", unit_scale=True, file=sys.stderr
    ) as shown:
        yield shown.update


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.consolidate",
        description="Consolidate the checkpoint of all ranks into one of the unsharded model, with"
        " a few MiB in memory at a time. If the command is killed, either the old or the complete"
        " new result exists; run it again and it continues where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ckpt_prefix",
        metavar="P",
        help="a checkpoint folder; or a folder of step-... folders, of which the newest is used; or"
        " the path prefix of per-rank torch files (not a pattern)",
    )
    parser.add_argument(
        "--ckpt_suffix",
        metavar="PATTERN",
        help="glob pattern that follows the prefix of per-rank torch files (default:"
        f" {LEGACY_SUFFIX}); with this option, P is always a prefix, even if there is a checkpoint"
        " folder P",
    )
    parser.add_argument(
        "--save_path",
        default="",
        metavar="S",
        help="file (.safetensors, .pth) or folder to write (default: the prefix followed by"
        f" {OUTPUT_NAME}, or the folder followed by _consolidated.safetensors; with --reshard by"
        " _of_M)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="format of the result (default: the extension of S; without one, safetensors for"
        " checkpoint folders and pth for per-rank torch files)",
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help="write several safetensors files with tensors of at most SIZE (500MB, 5GB, 2GiB) each,"
        " and model.safetensors.index.json; a larger tensor gets a separate file",
    )
    parser.add_argument(
        "--optimizer",
        action="store_true",
        help="also write the optimizer state by parameter name: optimizer.pth, or"
        " optimizer.safetensors and optimizer.json; S is then a folder",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="cast floating-point parameters (not buffers and not optimizer state) to this dtype",
    )
    parser.add_argument(
        "--reshard",
        type=int,
        metavar="M",
        help="write a checkpoint folder of M ranks instead, with parameters, buffers and optimizer"
        " state; from per-rank torch files only parameters and buffers",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="write nothing: check every byte of the checkpoint (digests, or the CRCs of per-rank"
        " torch files) and that nothing is missing",
    )
    parser.add_argument(
        "--tied",
        action="append",
        default=[],
        type=_tied_names,
        metavar="ALIAS=NAME",
        help="also save parameter NAME under the name ALIAS; for tied weights in checkpoints of"
        " torch_xla's class, which does not record them; may be repeated",
    )
    parser.add_argument(
        "--allow_unsafe_pickle",
        action="store_true",
        help="read per-rank torch files that have objects which torch does not consider safe: CODE"
        " IN THE FILES WILL RUN with your permissions; use it only for files that you would run as"
        " programs",
    )
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show a progress bar on stderr even if it is not a terminal",
    )
    return parser


def _tied_names(text: str) -> tuple[str, str]:
    alias, separator, name = text.partition("=")
    if not (alias and separator and name):
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form ALIAS=NAME")
    return alias, name


if __name__ == "__main__":
    raise SystemExit(main())
