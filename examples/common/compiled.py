"""``--compilation_cache``: the second start of a script loads its programs instead of compiling."""

import os
import sys
from types import SimpleNamespace

from absl import flags

import xla_fsdp

from . import script

flags.DEFINE_string(
    "compilation_cache",
    "",
    "keep compiled programs in this folder, so that the next start need not compile; default: "
    "~/.cache/xla_fsdp/compiled; none: keep nothing",
)
script.require(
    "compilation_cache", lambda path: not path or path.strip(), "is blank; name a folder, or none"
)


def switch_on(options: SimpleNamespace) -> None:
    """Keeps compiled programs as the flag says. To be called before ``launch``.

    ``options.compilation_cache`` becomes the folder, or "none".

    Raises:
        script.Stop: with code 2 if the named folder can not be used. Without the default one the
            script just compiles.
    """
    wish, options.compilation_cache = options.compilation_cache, "none"
    enable = xla_fsdp.enable_compilation_cache  # imports torch_xla, which settles on a device
    if wish == "none":
        return
    try:
        options.compilation_cache = str(enable(wish or None))
    except (OSError, ValueError, NotImplementedError) as error:
        reason = script.reason(error)
        if wish:
            raise script.Stop(f"--compilation_cache={wish}: {reason}", code=2) from error
        print(f"no compilation cache: {reason}", file=sys.stderr)


def summary(options: SimpleNamespace) -> str:
    """Where this process's programs came from."""
    compiled, cached = xla_fsdp.compilation_counts()
    if options.compilation_cache == "none":
        return f"{compiled} compiled"
    folder = options.compilation_cache
    home = os.path.expanduser("~") + os.sep
    if folder.startswith(home):
        folder = os.path.join("~", folder[len(home) :])
    return f"{compiled} compiled, {cached} from the cache in {folder}"
