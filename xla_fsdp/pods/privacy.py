"""Removes user names and secrets from a report, so that users can attach it to a bug report."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SHOWN = frozenset(
    """XLA_FLAGS LIBTPU_INIT_ARGS PJRT_DEVICE CPU_NUM_DEVICES XLA_USE_SPMD XLA_USE_BF16
    XLA_DOWNCAST_BF16 XLA_DISABLE_FUNCTIONALIZATION XLA_ENABLE_PARAM_ALIASING XLA_THREAD_POOL_SIZE
    NPROC XLA_NO_SPECIAL_SCALARS PT_XLA_DEBUG PT_XLA_DEBUG_LEVEL TPU_MEGACORE TPU_ACCELERATOR_TYPE
    TPU_CHIPS_PER_HOST_BOUNDS TPU_HOST_BOUNDS TPU_VISIBLE_CHIPS MEGASCALE_NUM_SLICES OMP_NUM_THREADS
    XLA_FSDP_DROP_IN JAX_PLATFORMS""".split()
)
_SECRET_NAME = re.compile(r"(?i)(token|secret|passw|credential|api_?key|private|cookie|auth)")
_SECRET_TEXT = re.compile(
    r"(?ix) (?P<url>[a-z][a-z0-9+.-]*://)[^\s/@]+@"  # a password in a URL
    r"| \b(?:bearer\s+|ya29\.|gh[pousr]_|hf_|sk-|AKIA|AIza|xox[abp]-)[\w.\-/+=]{8,}"
    r"| -----BEGIN[^-]+-----[\s\S]*?(?:-----END[^-]+-----|\Z)"
    r"| (?P<key>(?:token|secret|password|passwd|api_?key|credential)s?\s*[=:]\s*)[^\s,;&]+"
)
_HIDDEN = "***"
_SHORTEST = 6


def shown_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    shown = sorted(_SHOWN & environment.keys())
    return {name: scrubbed(environment[name], environment) for name in shown}


def scrubbed(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` without secrets and without the user's folder and name."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, _HIDDEN)
    text = _SECRET_TEXT.sub(lambda m: (m["url"] or m["key"] or "") + _HIDDEN, text)
    home = environment.get("HOME", "")
    if len(home) > 1:
        text = text.replace(home.rstrip("/"), "~")
    user = environment.get("USER") or environment.get("LOGNAME") or ""
    if len(user) > 3 and user != "root":
        text = re.sub(rf"\b{re.escape(user)}\b", "USER", text)
    return text
