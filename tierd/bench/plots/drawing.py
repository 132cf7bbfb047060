"""Draws a picture with matplotlib: no display, no state beyond the call. The only module that
imports matplotlib, which only `tierd bench plot` needs."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tierd.bench.plots.picture import REFERENCE, Band, Bars, Form, Line, Lines, Picture

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Of Okabe and Ito: told apart also by those who see fewer colours."""
MARKERS = "osD^vP"
DASHES = ("-", "--", "-.", ":")
GREY, INK = "#777777", "#222222"
WIDTH_INCHES = 12.0
LINES_INCHES = 3.0
LINES_WIDTH = 1.8
"""Of a panel of lines, beside one of bars."""
FRAME_INCHES = 1.4
"""Of a band, for its title, labels and legend."""
BAR_INCHES = 0.155
GAP_BARS = 0.7
"""Between two groups of bars, as a part of a bar's thickness."""
SETTINGS: dict[Any, Any] = {
    # Text stays text: it can be searched, and shrinks the file.
    "svg.fonttype": "none",
    "svg.hashsalt": "tierd",
    # What a measurement prints is no formula, whatever is in it.
    "text.parse_math": False,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "text.color": INK,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
}
METADATA: Mapping[Form, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
"""No time of day in it: the same measurement is the same file."""


def draw(picture: Picture, form: Form) -> bytes:
    """The file's bytes."""
    with matplotlib.rc_context(SETTINGS):
        heights = [_height(band) for band in picture.bands]
        size = (WIDTH_INCHES, sum(heights) + 0.5 + 0.2 * len(picture.notes))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.03))
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        if picture.notes:
            figure.supxlabel("\n".join(picture.notes), x=0.01, ha="left", fontsize=9.5)
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
        for part, band in zip(parts[:, 0], picture.bands, strict=True):
            _draw_band(part, band)
        file = io.BytesIO()
        figure.savefig(file, format=form, dpi=150, metadata=METADATA[form])
        return file.getvalue()


def _draw_band(part: SubFigure, band: Band) -> None:
    if band.title:
        part.suptitle(band.title, x=0.01, ha="left", fontsize=10.5)
    axes = part.subplots(
        1,
        len(band.panels),
        squeeze=False,
        sharex=band.shared == "xy",
        sharey=band.shared in ("y", "xy"),
        width_ratios=[LINES_WIDTH if isinstance(panel, Lines) else 1.0 for panel in band.panels],
    )[0]
    handles: dict[str, Any] = {}
    for at, panel in zip(axes, band.panels, strict=True):
        at.set_title(panel.title, loc="left")
        at.set_xlabel(panel.x)
        if isinstance(panel, Lines):
            found = _draw_lines(at, panel)
        else:
            found = _draw_bars(at, panel, _slots(_alike(band, panel)))
        for label, handle in found:
            handles.setdefault(label or band.limits, handle)
    # Not before all is there: what shares an axis would have its end, too.
    least = min(at.dataLim.ymin for at in axes)
    for at, panel in zip(axes, band.panels, strict=True):
        if isinstance(panel, Lines):
            at.set_xlim(left=0)
            if (least if band.shared else at.dataLim.ymin) >= 0:
                at.set_ylim(bottom=0)
    if band.shared:
        for at in axes[1:]:
            at.set_ylabel("")
    # What was promised comes last, wherever it was first met.
    labels = sorted(handles, key=lambda label: label == band.limits)
    columns = min(4, len(handles))
    part.legend(
        [handles[label] for label in labels], labels, loc="outside lower left", ncols=columns
    )


def _height(band: Band) -> float:
    """In inches, with all that stands around the panels."""
    inches = [
        LINES_INCHES
        if isinstance(panel, Lines)
        else BAR_INCHES * (_slots(_alike(band, panel))[-1].end + GAP_BARS)
        for panel in band.panels
    ]
    return FRAME_INCHES + max(inches)


def _alike(band: Band, panel: Bars) -> list[Bars]:
    """The panels of bars that share their groups with this one."""
    return [other for other in band.panels if isinstance(other, Bars)] if band.shared else [panel]


@dataclass(frozen=True)
class _Slot:
    """Where a group of bars stands, in thicknesses of a bar from the top on. `heading`: where its
    heading would."""

    heading: float
    middle: float
    end: float


def _slots(panels: Sequence[Bars]) -> list[_Slot]:
    """Of each group; the same in all panels, whose groups are alike."""
    found, y = [], 0.0
    for alike in zip(*(panel.groups for panel in panels), strict=True):
        headed = bool(alike[0].heading)
        y += GAP_BARS * (1 + (headed and y > 0))
        heading = y + 0.5
        y += 1.2 * headed
        bars = max(1, *(len(group.bars) for group in alike))
        found.append(_Slot(heading, y + bars / 2, y + bars))
        y += bars
    return found


def _draw_lines(at: Axes, panel: Lines) -> Iterator[tuple[str, Any]]:
    """Yields what a legend shows, by label; "" for what was promised."""
    for line in panel.lines:
        yield line.label, _draw_line(at, line)
    for mark in panel.marks:
        at.plot(
            *mark.point, "o", mfc="white", mec=_colour(mark.style), mew=1.5, clip_on=False, zorder=4
        )
        yield mark.label, Line2D([], [], marker="o", mfc="white", mec=INK, mew=1.5, ls="none")
    for limit in panel.limits:
        colour = INK if limit.style is None else _colour(limit.style)
        at.plot(*zip(*limit.points, strict=True), color=colour, ls=(0, (1, 1)), lw=2.2)
        yield "", Line2D([], [], color=INK, ls=(0, (1, 1)), lw=2.2)
    at.set_ylabel(panel.y)


def _draw_line(at: Axes, line: Line) -> Any:
    x, y = zip(*line.points, strict=True)
    if line.style == REFERENCE:
        return at.plot(x, y, color=GREY, lw=1.2, ls="--")[0]
    colour = _colour(line.style)
    if line.spans:
        low, high = zip(*line.spans, strict=True)
        at.vlines(x, low, high, color=colour, lw=1.0)
    return at.plot(
        x,
        y,
        color=colour,
        lw=1.8,
        ls=DASHES[line.dash % len(DASHES)],
        drawstyle="steps-post" if line.steps else "default",
        marker="" if line.steps else MARKERS[line.style % len(MARKERS)],
        ms=5.5,
    )[0]


def _draw_bars(at: Axes, panel: Bars, slots: Sequence[_Slot]) -> Iterator[tuple[str, Any]]:
    """Yields what a legend shows, as `_draw_lines`."""
    labels: dict[float, str] = {}
    for group, slot in zip(panel.groups, slots, strict=True):
        if group.heading:
            labels[slot.heading] = group.heading
        labels[slot.middle] = group.label
        for n, bar in enumerate(group.bars):
            y = slot.middle + n - (len(group.bars) - 1) / 2
            at.barh(y, bar.value, height=0.86, color=_colour(bar.style))
            yield bar.label, Patch(color=_colour(bar.style))
            if bar.limit is not None:
                at.plot([bar.limit] * 2, [y - 0.43, y + 0.43], color=INK, lw=2.2, zorder=3)
                yield "", Line2D([], [], color=INK, marker="|", ls="none", ms=10, mew=2.2)
    at.set_ylim(slots[-1].end + GAP_BARS, 0)
    at.set_yticks(list(labels), list(labels.values()))
    headings = {group.heading for group in panel.groups} - {""}
    for label in at.get_yticklabels():
        if label.get_text() in headings:
            label.set_fontweight("bold")
    at.tick_params(axis="y", length=0)
    at.grid(visible=False, axis="y")


def _colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]
