"""One rank of the demo. Prints JSON lines: progress (rank 0 alone), then what it saw; stays until
its standard input ends, so that its session can be looked at.

Started by `tierd demo`; the ranks of a group meet through a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from tierd_client import TierClient
from tierd_client.demo.engine import Engine
from tierd_client.demo.pages import DevicePages
from tierd_client.demo.presets import CUDA, HOST
from tierd_client.demo.workload import Workload

GROUP_TIMEOUT = timedelta(seconds=120)
SEED = 20_26
CONNECT_S = 60.0
_RATE_BYTES = 1 << 30


def main() -> None:
    """Serve the demo's turns as one rank."""
    options = _parse()
    on_cuda = options.device == "cuda"
    geometry, shape = CUDA if on_cuda else HOST
    if on_cuda:
        torch.cuda.set_device(options.rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda" if on_cuda else "cpu")
    # All ranks are on this host, which may have no other interface that works.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=options.rank,
        world_size=options.world_size,
        timeout=GROUP_TIMEOUT,
    )
    pages = DevicePages(geometry, options.rank, device, options.arena)
    forward = torch.cuda.Stream() if on_cuda else None
    client = TierClient(
        options.socket,
        [pages.pool()],
        namespace={"model": "demo", "world_size": str(options.world_size)},
        instance=options.instance,
        rank=options.rank,
        world_size=options.world_size,
        forward_stream=forward,
    )
    if not client.connect(CONNECT_S):
        raise SystemExit(f"no daemon answers on {options.socket}")
    engine = Engine(client, pages, _minimum, forward)
    workload = Workload(shape, SEED)
    turns = 0
    while turns < options.turns:
        batch = workload.next_batch()
        engine.step(batch)
        turns += len(batch)
        if options.rank == 0:
            _say(turns=turns, restored=engine.counts.restored, evicted=engine.cache.evicted)
    engine.finish()
    rates = _contiguous_rates(options.rank) if on_cuda else {}
    counts = asdict(engine.counts)
    enqueue_us = np.asarray(counts.pop("enqueue_s")) * 1e6
    _say(
        result={
            **counts,
            **rates,
            "enqueue_p50_us": float(np.percentile(enqueue_us, 50)),
            "enqueue_p99_us": float(np.percentile(enqueue_us, 99)),
            "turns": turns,
            "working_set_pages": workload.pages,
            "device_pages": geometry.pages,
            "device_evicted": engine.cache.evicted,
            "page_bytes": geometry.page_bytes,
        }
    )
    sys.stdin.read()
    client.close()
    dist.destroy_process_group()


def _minimum(values: Sequence[int]) -> list[int]:
    """The least of each over the group: what engines call an all-reduce."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return [int(value) for value in tensor]


def _contiguous_rates(rank: int) -> dict[str, float]:
    """What this link can do, in GB/s (1e9 bytes): one large copy between the GPU and pinned memory,
    with nothing beside it, as a measure for the copiers' rates. Rank 0 alone copies.
    """
    torch.cuda.synchronize()
    dist.barrier()
    rates: dict[str, float] = {}
    if rank == 0:
        device = torch.empty(_RATE_BYTES, dtype=torch.uint8, device="cuda")
        host = torch.empty(_RATE_BYTES, dtype=torch.uint8, pin_memory=True)
        for name, target, source in (("d2h", host, device), ("h2d", device, host)):
            rates[f"contiguous_{name}_gbps"] = max(_rate(target, source) for _ in range(5))
    dist.barrier()
    return rates


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    seconds = float(start.elapsed_time(end)) * 1e-3
    return _RATE_BYTES / seconds / 1e9


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tierd_client.demo", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="a file that does not exist yet")
    parser.add_argument("--device", choices=("host", "cuda"), required=True)
    parser.add_argument("--arena", action="store_true")
    parser.add_argument("--turns", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
