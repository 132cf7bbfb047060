"""The GPUs that CUDA sees, asked for in a short-lived process, so that control never touches CUDA.

No context is created: enumeration costs no GPU memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierd.wire.errors import ConfigError

TIMEOUT_S = 60.0
"""The first `cuInit` after boot can take many seconds where no persistence daemon runs."""
_NO_BINDINGS = 3
_CUDA_ERROR = 4


def visible_gpus(dev: Path = Path("/dev")) -> list[str]:
    """UUIDs ("GPU-...", as nvidia-smi prints them) in CUDA's order; empty if there is none.

    Args:
        dev: Where the driver's device files are.

    Raises: ConfigError: there are GPUs, but they cannot be used from here; it says why.
    """
    if not _has_gpu(dev):
        return []
    try:
        probe = subprocess.run(
            [sys.executable, "-m", "tierd.cli.gpus"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the CUDA driver did not answer within {TIMEOUT_S:.0f} s; see `nvidia-smi`, "
            "or choose `--devices host`"
        ) from None
    if probe.returncode == _NO_BINDINGS:
        raise ConfigError(
            "this machine has GPUs, but the package cuda-bindings is missing: "
            "`pip install 'tierd[cuda]'`, or choose `--devices host`"
        )
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
        raise ConfigError(
            f"this machine has GPUs, but CUDA cannot use them: {lines[-1]}. "
            "See `nvidia-smi`, or choose `--devices host`"
        )
    return [str(gpu) for gpu in json.loads(probe.stdout)]


def _has_gpu(dev: Path) -> bool:
    """Whether the NVIDIA driver gives this machine, or this container, a GPU."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia[0-9]*"))


def _enumerate() -> list[str]:
    """Runs in the short-lived process."""
    from cuda.bindings import driver

    def call(function: Callable[..., Any], *args: Any) -> Any:
        error, *values = function(*args)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise SystemExit(_fail(f"{function.__name__} answers {error.name}"))
        return values[0] if values else None

    (error,) = driver.cuInit(0)
    if error == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return []
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(_fail(f"cuInit answers {error.name}"))
    return [
        f"GPU-{uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes))}"
        for device in (
            call(driver.cuDeviceGet, ordinal) for ordinal in range(call(driver.cuDeviceGetCount))
        )
    ]


def _fail(reason: str) -> int:
    print(reason, file=sys.stderr)
    return _CUDA_ERROR


if __name__ == "__main__":
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        sys.exit(_NO_BINDINGS)
    print(json.dumps(_enumerate()))
