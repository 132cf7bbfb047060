"""What a run of `tierd demo` adds up to, whether it is a success, and how it is shown. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tierd.cli.render import describe
from tierd.memory.limits import format_size

Figures = Mapping[str, Any]

_SHARED = ("turns", "device_hits", "lost", "restored", "kept", "shed", "device_evicted")
"""What every rank of a group must have counted alike."""


def summarise(ranks: Sequence[Figures], status: Figures) -> dict[str, Any]:
    """One object from what each rank saw and from the daemon's status afterwards.

    Pages are counted once for the group, bytes over all ranks. Rates are in GB/s, 1e9 bytes.
    """
    first, world = ranks[0], len(ranks)
    report: dict[str, Any] = {
        "ranks": world,
        "turns": first["turns"],
        "working_set_pages": first["working_set_pages"],
        "device_pages": first["device_pages"],
        "host_pages": sum(pool["slots_total"] for pool in status["pools"]),
        "page_bytes": first["page_bytes"],
        "pages_device_hits": first["device_hits"],
        "pages_lost_on_device": first["lost"],
        "pages_restored": first["restored"],
        "restores_failed": first["restores_failed"],
        "hit_rate": first["restored"] / first["lost"] if first["lost"] else 0.0,
        "pages_shed": first["shed"],
        "pages_evicted_device": first["device_evicted"],
        "enqueue_p50_us": max(rank["enqueue_p50_us"] for rank in ranks),
        "enqueue_p99_us": max(rank["enqueue_p99_us"] for rank in ranks),
        "bytes_checked": sum(rank["bytes_checked"] for rank in ranks),
        "bytes_wrong": sum(rank["bytes_wrong"] for rank in ranks),
        "ranks_agree": all(rank[name] == first[name] for rank in ranks for name in _SHARED),
        **daemon_figures(status, world),
    }
    for direction, link in (("backup", "d2h"), ("restore", "h2d")):
        contiguous = first.get(f"contiguous_{link}_gbps")
        if contiguous:
            report[f"contiguous_{link}_gbps"] = contiguous
            report[f"{direction}_fraction"] = report[f"{direction}_gbps"] / contiguous
    return report


def daemon_figures(status: Figures, world: int) -> dict[str, Any]:
    """The daemon's side: pages moved and evicted, the copiers' rates while they copied."""
    copiers = status["copiers"]
    figures: dict[str, Any] = {
        "pages_backed_up": sum(copier["backup_pages"] for copier in copiers) // world,
        "pages_evicted_host": sum(pool["evictions"] for pool in status["pools"]),
        "copy_path": ", ".join(sorted({pool["copy_path"] for pool in status["pools"]})),
        "copiers": [{name: copier[name] for name in ("device", "detail")} for copier in copiers],
    }
    for direction in ("backup", "restore"):
        nbytes = sum(copier[f"{direction}_bytes"] for copier in copiers)
        seconds = sum(copier[f"{direction}_seconds"] for copier in copiers)
        figures[f"{direction}_gbps"] = nbytes / seconds / 1e9 if seconds else 0.0
    return figures


def failures(report: Figures) -> list[str]:
    """Why a run is no success; empty if it is one."""
    reasons = []
    if report["bytes_wrong"]:
        reasons.append(f"{report['bytes_wrong']} bytes are wrong")
    if not report["bytes_checked"]:
        reasons.append("no byte was checked")
    if report.get("aborted"):
        reasons.append(f"{report['aborted']} requests were aborted")
    if not report.get("ranks_agree", True):
        reasons.append("the ranks counted different things")
    for name, what in (
        ("pages_backed_up", "backed up"),
        ("pages_evicted_device", "evicted from the device"),
        ("pages_evicted_host", "evicted from host memory"),
        ("pages_restored", "restored"),
    ):
        if name in report and not report[name]:
            reasons.append(f"no page was {what}; more --turns or less --memory would show it")
    return reasons


def as_table(report: Figures) -> Table:
    """The report as `tierd demo` prints it."""
    table = Table(title="tierd demo", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, text in _rows(report):
        table.add_row(label, text)
    wrong = report["bytes_wrong"]
    table.add_row("bytes wrong", f"[bold {'red' if wrong else 'green'}]{wrong:,}[/]")
    for reason in report["failures"]:
        table.add_row("[bold red]failed[/]", reason)
    return table


def _rows(report: Figures) -> list[tuple[str, str]]:
    """The figures that a report has, in reading order."""
    rows: list[tuple[str, str]] = []

    def row(label: str, name: str, form: str = "{:,}") -> None:
        if report.get(name, "") != "":
            rows.append((label, form.format(report[name])))

    row("ranks", "ranks")
    row("requests", "requests")
    row("turns", "turns")
    row("distinct pages asked for", "working_set_pages")
    row("pages the device holds", "device_pages")
    row("pages host memory holds", "host_pages")
    if "page_bytes" in report:
        rows.append(("bytes of a page, a rank", format_size(report["page_bytes"])))
    row("pages backed up", "pages_backed_up")
    row("pages restored", "pages_restored")
    row("pages evicted from the device", "pages_evicted_device")
    row("pages evicted from host memory", "pages_evicted_host")
    row("pages shed", "pages_shed")
    row("restores failed", "restores_failed")
    row("hit rate of pages lost on the device", "hit_rate", "{:.1%}")
    for direction, link, label in (("backup", "d2h", "to host"), ("restore", "h2d", "to device")):
        row(f"copies {label}", f"{direction}_gbps", "{:.1f} GB/s")
        row(f"one contiguous copy {label}", f"contiguous_{link}_gbps", "{:.1f} GB/s")
        row(f"fraction of it {label}", f"{direction}_fraction", "{:.2f}")
    row("copy path", "copy_path", "{}")
    row("enqueue path, p50", "enqueue_p50_us", "{:,.0f} us a step")
    row("enqueue path, p99", "enqueue_p99_us", "{:,.0f} us a step")
    for copier in report.get("copiers", ()):
        rows.append((f"copier of {copier['device']}", describe(copier["detail"])))
    row("seconds", "seconds")
    row("bytes checked", "bytes_checked")
    return rows
