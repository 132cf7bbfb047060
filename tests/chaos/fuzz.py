"""A long fuzz run: `python tests/chaos/fuzz.py --messages 10000000 --seed 7`."""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "integration")]

from fuzz_targets import TARGETS  # noqa: E402


def fuzz(name: str, messages: int, seed: int, report: bool) -> None:
    """Feed one target. Raises: whatever shows a fault."""
    make, _, _ = TARGETS[name]
    started, said = time.monotonic(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierd-fuzz-") as directory:
        target = make(random.Random(f"{name} {seed}"), Path(directory))
        done = 0
        while done < messages:
            some = min(10_000, messages - done)
            target.feed(some)
            done += some
            if report and time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"{name}, seed {seed}: {done:,} of {messages:,}", flush=True)
        target.close()
    if report:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        lines = f", {target.lines} lines of tierd" if hasattr(target, "lines") else ""
        took = time.monotonic() - started
        print(
            f"{name}, seed {seed}: {messages:,} messages in {took:.0f} s, no fault{lines}; "
            f"largest RSS {rss} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, with commas between")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # a line for each bad message, as it should be
    names = options.targets.split(",")
    whole = sum(TARGETS[name][2] for name in names)
    for name in names:
        fuzz(name, int(options.messages * TARGETS[name][2] / whole), options.seed, report=True)


if __name__ == "__main__":
    main()
