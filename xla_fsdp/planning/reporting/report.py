"""The report on one compiled step, with all that can be done with it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ... import extras
from ..compiling.cache import write_whole
from . import compare, page, storage, text
from .findings import Findings

if TYPE_CHECKING:
    from .beside import Beside


class Report(Findings):
    """What a compiled step needs on a slice: ``print`` it, plot, save and compare it."""

    def __repr__(self) -> str:
        return f"<Report {self.title or 'step'}: {self.verdict}>"

    def __str__(self) -> str:
        return text.text(self)

    def to_json(self) -> str:
        """The report as JSON, in full; ``from_json`` reads it."""
        return storage.encode(self)

    @classmethod
    def from_json(cls, text: str, source: str = "this text") -> Report:
        """The report that ``to_json`` wrote; sequences come back as tuples.

        Raises:
            ValueError: the text is something else. ``source`` says in the message where it is from.
        """
        return storage.decode(cls, text, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, with the schedule, as JSON. The file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(storage.target(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a report.
        """
        return cls.from_json(storage.read(path), str(path))

    def compare(self, other: Report) -> compare.Comparison:
        """This report side by side with another; ratios are this one over the other.

        Raises:
            TypeError: ``other`` is no report.
        """
        return compare.compare(self, other)

    def beside(self, trace: str | os.PathLike[str]) -> Beside:
        """This plan beside a recorded trace: ``print`` it, or ``.plot("both.html")``.

        ``trace``: the folder that :class:`xla_fsdp.profile` was given, of which the newest trace is
        taken, or a file in it.

        Raises:
            FileNotFoundError: there is no trace.
            ValueError: it is damaged, without names, or of another model; or this plan has no
                timeline.
            MissingExtraError: (an ImportError) protobuf or jax is not installed.
        """
        extras.require_extra("plan", "a recorded trace", ("google.protobuf", "jaxlib"))
        if text.missing(self):
            raise ValueError(f"nothing to compare a trace with. {text.missing(self)}")
        from ..recorded.trace import read_trace  # with protobuf, which plans do without
        from .beside import Beside

        return Beside(self, read_trace(trace))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw HBM over the schedule, and the timeline of the step, with matplotlib.

        ``.png`` is a picture, ``.html`` one page that needs nothing else, with figures to hover
        over and the tables as well.

        Raises:
            ValueError: another suffix.
            FileNotFoundError: there is no such folder.
            MissingExtraError: (an ImportError) matplotlib is not installed.
        """
        target = storage.target(path)
        if target.suffix.lower() not in (".png", ".html"):
            message = f"cannot plot to {str(path)!r}: allowed are .png and .html; rename the file"
            raise ValueError(message)
        extras.require_extra("plan", "a plot", ("matplotlib",))
        if target.suffix.lower() == ".html":
            write_whole(target, page.page(self).encode())
        else:
            from .pictures import picture  # with matplotlib, which printing and saving do without

            write_whole(target, picture(self))
