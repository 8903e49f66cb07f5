"""Command line: ``python -m xla_fsdp.consolidate``.

Progress and errors go to stderr, the last line, which says what was written, to stdout.
Exit codes: 0 written, 2 wrong usage or a checkpoint that cannot be consolidated, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from .checkpoints import OUTPUT_NAME, run
from .errors import CheckpointError


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (default: of the process) and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        report = run(
            arguments.ckpt_prefix,
            arguments.ckpt_suffix,
            arguments.save_path,
            save_model=True,
            tied=dict(arguments.tied),
            progress=lambda line: print(line, file=sys.stderr),
        )
    except CheckpointError as error:
        # One line whatever is in a file name or in a message passed on from elsewhere.
        message = str(error).replace("\r", "\\r").replace("\n", "\\n")
        print(f"{type(error).__name__}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted, nothing written", file=sys.stderr)
        return 130
    print(
        f"wrote {report.path}: {report.parameters} parameters"
        f" ({report.elements} elements), {report.bytes} bytes"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.consolidate",
        description="Join the checkpoint files of all ranks into one file of the unsharded model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ckpt_prefix",
        required=True,
        metavar="P",
        help="path prefix of the rank files, taken literally",
    )
    parser.add_argument(
        "--ckpt_suffix",
        default="*.pth",
        metavar="PATTERN",
        help="glob pattern that follows the prefix (default: %(default)s)",
    )
    parser.add_argument(
        "--save_path",
        default="",
        metavar="S",
        help=f"file to write (default: the prefix followed by {OUTPUT_NAME})",
    )
    parser.add_argument(
        "--tied",
        action="append",
        default=[],
        type=_tied_names,
        metavar="ALIAS=NAME",
        help="also save parameter NAME as ALIAS; for tied weights in checkpoints of the in-tree"
        " class, which does not record them; may be repeated",
    )
    return parser


def _tied_names(text: str) -> tuple[str, str]:
    alias, separator, name = text.partition("=")
    if not (alias and separator and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ALIAS=NAME")
    return alias, name
