"""The daemon's log: one line an event, for people, on stderr."""

from __future__ import annotations

import logging
import sys
import time


def log_to_stderr(level: str) -> None:
    """Lines as `2026-01-31T12:00:00.123Z INFO tierd.control: text`, in UTC."""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
