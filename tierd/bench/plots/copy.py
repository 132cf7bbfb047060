"""The picture of `tierd bench copy`: rates by kind of pages, and when a restore's layers land."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from tierd.bench import targets
from tierd.bench.plots.picture import REFERENCE, Band, Bar, Bars, Group, Limit, Line, Lines, Picture
from tierd.bench.plots.results import INCOMPLETE, Machine, NothingMeasuredError, page_words
from tierd.memory.limits import format_size

Positive = Annotated[float, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Placement = Literal["arena", "stock"]

PLACEMENTS: dict[Placement, str] = {
    "arena": "one allocation (arena)",
    "stock": "one a layer (stock)",
}
DIRECTIONS = {
    "to_host": "to the host (D2H)",
    "to_device": "to the device (H2D)",
    "both": "both at once",
}
PROMISED = "promised on an H200: at least"
PROMISED_S = "promised on an H200: by then"


class Link(msgspec.Struct):
    """The contiguous copies, in GB/s."""

    to_host: Positive
    to_device: Positive
    both: Positive


class RateRow(msgspec.Struct):
    """A batch; as `tierd_client.bench.copy.RateRow`, as far as it is drawn."""

    model: str
    placement: Placement
    page_tokens: Count
    run: Count
    pages: Count
    nbytes: Count
    to_host: Rate
    to_device: Rate
    both: Rate


class LayerRow(msgspec.Struct):
    """A restore; as `tierd_client.bench.copy.LayerRow`, as far as it is drawn."""

    model: str
    placement: Placement
    page_tokens: Count
    tokens: Count
    nbytes: Count
    landed_s: Annotated[list[Rate], msgspec.Meta(min_length=1)]
    first_group: Count


class Result(msgspec.Struct):
    """What the command prints."""

    rates: list[RateRow]
    layers: list[LayerRow]
    link: Link | None = None
    left_out: list[str] = []
    machine: Machine | None = None
    complete: bool = False


class Kind(NamedTuple):
    """What a group of bars is of. `pages`: those of the batch."""

    model: str
    page_tokens: int
    run: int
    pages: int


def picture(result: Result) -> Picture:
    """Raises: NothingMeasuredError: it was cut off before its first row."""
    if result.machine is None or result.link is None or not (result.rates or result.layers):
        raise NothingMeasuredError("copy")
    # What is promised is promised of a link; in memory there is none.
    promised = result.machine.gpu is not None
    bands = []
    if result.rates:
        bands.append(_rates(result.rates, result.link, promised))
    if result.layers:
        bands.append(_layers(result.layers, result.rates, result.link, promised))
    notes = [*([] if result.complete else [INCOMPLETE]), *result.left_out]
    return Picture("copy", f"tierd bench copy: {result.machine.words()}", bands, notes)


def _rates(rows: Sequence[RateRow], link: Link, promised: bool) -> Band:
    by_kind: dict[Kind, dict[Placement, RateRow]] = {}
    for row in rows:
        kind = Kind(row.model, row.page_tokens, row.run, row.pages)
        by_kind.setdefault(kind, {})[row.placement] = row
    large = {kind[:3]: kind.pages for kind in sorted(by_kind, key=lambda kind: kind.pages)}
    panels = []
    for direction, words in DIRECTIONS.items():
        contiguous = getattr(link, direction)
        groups, last = [], ""
        for kind, found in by_kind.items():
            is_large = large[kind[:3]] == kind.pages
            bars = [
                Bar(
                    PLACEMENTS[name],
                    style,
                    getattr(found[name], direction) / contiguous,
                    _promised(name, kind, direction) if promised and is_large else None,
                )
                for style, name in enumerate(PLACEMENTS)
                if name in found
            ]
            label = page_words(kind.page_tokens, kind.run)
            if not is_large:
                label += f", batch of {kind.pages:,}"
            groups.append(Group(label, bars, "" if kind.model == last else kind.model))
            last = kind.model
        title = f"{words}: 1.0 is {contiguous:.1f} GB/s"
        panels.append(Bars(title, "of the contiguous copy", groups))
    size = format_size(max(row.nbytes for row in rows))
    return Band(
        "Rates, as fractions of one contiguous copy of the same run "
        f"(batches of up to {size}, where no other stands)",
        panels,
        PROMISED,
        "xy",
    )


def _promised(placement: Placement, kind: Kind, direction: str) -> float | None:
    if kind.model != targets.MODEL:
        return None
    return targets.RATES.get((placement, kind.page_tokens, kind.run), {}).get(direction)


def _layers(rows: Sequence[LayerRow], rates: Sequence[RateRow], link: Link, promised: bool) -> Band:
    restores: dict[tuple[str, int, int], list[LayerRow]] = {}
    for row in rows:
        restores.setdefault((row.model, row.page_tokens, row.tokens), []).append(row)
    panels = []
    for (model, page_tokens, tokens), found in restores.items():
        count, nbytes = len(found[0].landed_s), found[0].nbytes
        ideal_ms = nbytes / link.to_device / 1e6
        lines = [
            Line("ideal: bytes over the contiguous rate", REFERENCE, [(0, 0), (ideal_ms, count)])
        ]
        limits = []
        for row in found:
            style = list(PLACEMENTS).index(row.placement)
            landed = enumerate(sorted(row.landed_s), 1)
            points = [(0.0, 0.0), *((at * 1e3, float(n)) for n, at in landed)]
            lines.append(Line(PLACEMENTS[row.placement], style, points, steps=True))
            if promised:
                limits += _layer_limits(row, rates, link, style)
        panels.append(
            Lines(
                f"{model}, {page_tokens}-token pages: {tokens:,} tokens, {nbytes / 1e6:,.0f} MB",
                "ms from the load on",
                "layers",
                lines,
                limits=limits,
            )
        )
    return Band("Layers of a restore that can be used", panels, PROMISED_S)


def _layer_limits(row: LayerRow, rates: Sequence[RateRow], link: Link, style: int) -> list[Limit]:
    """When layer 0, and when all layers are to be there."""
    if row.model != targets.MODEL or row.page_tokens != targets.LAYER_PAGE_TOKENS:
        return []
    count = len(row.landed_s)
    group_bytes = row.nbytes * row.first_group / count
    first_s = targets.first_layer_s(row.tokens, group_bytes, link.to_device)
    alike = [
        rate.to_device
        for rate in sorted(rates, key=lambda rate: rate.nbytes)
        if (rate.model, rate.placement, rate.page_tokens, rate.run)
        == (row.model, row.placement, row.page_tokens, 1)
        and rate.to_device
    ]
    all_s = targets.whole_restore_s(row.tokens, row.nbytes, alike[-1]) if alike else None
    spans = [(first_s, 0, row.first_group), (all_s, count - row.first_group, count)]
    return [
        Limit([(at_s * 1e3, low), (at_s * 1e3, high)], style)
        for at_s, low, high in spans
        if at_s is not None
    ]
