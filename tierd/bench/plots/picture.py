"""What is drawn, down to every label and point, and nothing of how: the words between the modules
that read a measurement and the one that draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]

Form = Literal["svg", "png", "pdf"]
FORMS: tuple[Form, ...] = ("svg", "png", "pdf")
"""As what it can be drawn."""

REFERENCE = -1
"""The style of what nothing measured: an ideal."""


@dataclass(frozen=True)
class Line:
    """Something measured at several places.

    Attributes:
        style: The same number is the same colour and marker in the whole picture.
        points: (x, y), in the order of x.
        spans: Of each point, the least and the most y that it stands for; or nothing at all.
        steps: y stays until the next x; else straight from point to point.
        dash: Tells lines of one style apart; 0 is solid.
    """

    label: str
    style: int
    points: Sequence[Point]
    spans: Sequence[tuple[float, float]] = ()
    steps: bool = False
    dash: int = 0


@dataclass(frozen=True)
class Mark:
    """One moment on a line's way that has a meaning of its own."""

    label: str
    style: int
    point: Point


@dataclass(frozen=True)
class Limit:
    """What was promised: the measured is to stay on one side of it, from point to point.

    Attributes:
        style: Of the lines that it is promised for; None: of all.
    """

    points: Sequence[Point]
    style: int | None = None


@dataclass(frozen=True)
class Lines:
    """A panel of lines. Its x axis begins at 0."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    limits: Sequence[Limit] = ()


@dataclass(frozen=True)
class Bar:
    """One value, from 0 on. `limit`: what was promised of it."""

    label: str
    style: int
    value: float
    limit: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars below each other that share a label. `heading`: stands above this group, for those that
    follow too."""

    label: str
    bars: Sequence[Bar]
    heading: str = ""


@dataclass(frozen=True)
class Bars:
    """A panel of bars. `x`: what their length is."""

    title: str
    x: str
    groups: Sequence[Group]


Panel = Lines | Bars


@dataclass(frozen=True)
class Band:
    """Panels side by side that share a legend.

    Attributes:
        limits: What the legend calls the limits in it.
        shared: Axes that are the same in all panels, and labelled once. If `y` is, panels of bars
            have the same groups.
    """

    title: str
    panels: Sequence[Panel]
    limits: str = ""
    shared: Literal["", "y", "xy"] = ""


@dataclass(frozen=True)
class Picture:
    """All of it. `command`: whose output it is. `notes`: what a reader must know, and cannot see
    in it."""

    command: str
    title: str
    bands: Sequence[Band]
    notes: Sequence[str] = ()
