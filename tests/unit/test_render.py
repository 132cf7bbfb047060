"""What `tierd status` shows, from a status as a busy daemon on a GPU gives it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tierd.cli.render import describe, duration, hit_rate, rate_gbps, render_status

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "protocol": 1,
    "pid": 77,
    "socket": "/run/tierd/llama/tierd.sock",
    "uptime_s": 7300.0,
    "paused": True,
    "draining": False,
    "longest_turn_s": 0.002,
    "memory": {
        "total_bytes": 64 << 30,
        "claimed_bytes": 16 << 30,
        "chunk_bytes": 64 << 20,
        "pinned_bytes": 24 << 30,
        "pin_ahead_bytes": 64 << 30,
        "by_page": {"2097152": 20 << 30, "4096": 4 << 30},
        "joined_bytes": 3 << 30,
    },
    "pools": [
        {
            "namespace": "0123456789ab",
            "pool": "kv",
            "shards": 2,
            "page_tokens": 64,
            "slot_bytes": 9 << 20,
            "slots_total": 1800,
            "slots_used": 1234,
            "bytes_total": 1800 * (9 << 20),
            "bytes_used": 1234 * (9 << 20),
            "pages": 1230,
            "leased": 4,
            "evictions": 56,
            "hits": 300,
            "misses": 100,
            "copy_path": "strided",
        }
    ],
    "queue": {"backups": 3, "backup_pages": 21, "restores": 1, "oldest_s": 0.25},
    "sessions": [
        {
            "instance": "engine-a",
            "rank": 1,
            "world_size": 2,
            "pid": 88,
            "device": "GPU-b",
            "namespace": "0123456789ab",
            "epoch": "",
            "connected_s": 90.0,
            "software": "tierd_client 0.1.0",
        }
    ],
    "copiers": [
        {
            "device": "GPU-b",
            "pid": 99,
            "state": "ready",
            "restarts": 1,
            "silent_s": 0.0,
            "killed_at_s": 40.0,
            "backup_pages": 10,
            "backup_bytes": 50_000_000_000,
            "backup_seconds": 1.0,
            "restore_pages": 0,
            "restore_bytes": 0,
            "restore_seconds": 0.0,
            "detail": {"gpu": "NVIDIA H200", "gpu_memory_bytes": 524 << 20},
        }
    ],
    "counters": {},
}


def shown(status: dict[str, Any], width: int = 250) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render_status(status))
    return capture.get()


def test_a_busy_daemon_shows_its_pools_engines_and_copiers() -> None:
    text = shown(STATUS)
    for words in (
        "up 2.0 h",
        "PAUSED",
        "16.0 GiB of 64.0 GiB claimed",
        "3 backups (21 pages), 1 restores, oldest 0.2 s",
        "1,234",
        "75.0%",
        "strided",
        "1 of 2",
        "90 s",
        "50.0 GB/s",
        "gpu NVIDIA H200, gpu memory 524.0 MiB",
    ):
        assert words in text


def test_a_terminal_of_120_columns_shows_a_busy_pool_in_one_line() -> None:
    (pool,) = STATUS["pools"]
    numbers = {"slots_used": 999_999, "slots_total": 1_000_000, "evictions": 10**8, "leased": 9999}
    (line,) = (
        line
        for line in shown({**STATUS, "pools": [pool | numbers]}, 120).splitlines()
        if "kv" in line
    )
    for words in ("0123456789ab", "64 tok, 9.0 MiB", "999,999 of 1,000,000", "75.0%", "strided"):
        assert words in line


def test_ids_are_cut_where_their_beginning_tells_them_apart() -> None:
    (engine,) = STATUS["sessions"]
    text = shown(
        {
            **STATUS,
            "sessions": [{**engine, "device": "GPU-111111111111-2222", "instance": "f" * 32}],
        }
    )
    assert "GPU-111111111111\u2026" in text
    assert f"{'f' * 16}\u2026" in text


def test_a_daemon_that_serves_says_nothing_of_a_pause() -> None:
    assert "PAUSED" not in shown({**STATUS, "paused": False})


def test_what_the_kernel_has_joined_is_named_beside_the_pages_that_were_asked_for() -> None:
    text = " ".join(shown(STATUS).split())
    assert "(20.0 GiB in 2.0 MiB pages, 4.0 GiB in 4.0 KiB pages; the kernel has joined" in text
    unjoined = {**STATUS["memory"], "joined_bytes": 0}
    assert "joined" not in shown({**STATUS, "memory": unjoined})


def test_a_daemon_that_ends_says_so() -> None:
    assert "ENDING" not in shown(STATUS)
    assert "ENDING" in shown({**STATUS, "draining": True})


def test_of_a_copier_that_does_not_answer_it_is_said_what_happens_next() -> None:
    (copier,) = STATUS["copiers"]
    assert "answer" not in shown(STATUS)
    text = shown({**STATUS, "copiers": [{**copier, "silent_s": 12.3}]})
    assert "not answering for 12 s; killed and started again at 40 s" in text


def test_an_idle_daemon_has_empty_tables() -> None:
    assert "Engines" in shown({**STATUS, "pools": [], "sessions": [], "copiers": []})


def test_what_was_never_tried_has_no_rate() -> None:
    assert hit_rate(0, 0) == "-"
    assert rate_gbps(0, 0.0) == "-"
    assert describe({}) == ""


def test_durations_are_in_the_unit_that_people_would_use() -> None:
    seconds = (12, 180, 7300, 400_000)
    assert [duration(s) for s in seconds] == ["12 s", "3 min", "2.0 h", "4.6 d"]
