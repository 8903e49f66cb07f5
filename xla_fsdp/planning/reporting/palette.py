"""The colours of pictures, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
# Okabe and Ito's colours, which the colour-blind can tell apart.
COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#0072B2",
        "backward": "#009E73",
        "optimizer": "#CC79A7",
        "": "#8A8A8A",
        SYNCHRONOUS: "#D55E00",
        ASYNCHRONOUS: "#56B4E9",
        "arguments": "#BDBDBD",
        "outputs": "#6E6E6E",
        "gathered weights": "#E69F00",
        "made in forward": "#0072B2",
        "made in backward": "#009E73",
        "made in optimizer": "#CC79A7",
        "other temporaries": "#56B4E9",
        "capacity": "#D55E00",
    }
)
KINDS = tuple(COLORS)[:6]  # of what the timeline shows
PURPOSES = tuple(COLORS)[6:13]  # of memory, from the bottom up
MODULE, CURVE = "#DDE3EA", "#9DB4C8"
_CALLED = {
    "": "other compute",
    SYNCHRONOUS: "synchronous collective: compute waits",
    ASYNCHRONOUS: "asynchronous: compute goes on",
}


def legend(present: set[str]) -> list[tuple[str, str]]:
    """The kinds of a timeline in words, each with its colour."""
    return [(_CALLED.get(kind, kind), COLORS[kind]) for kind in KINDS if kind in present]
