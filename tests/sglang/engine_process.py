"""One rank of an engine, told what to do by lines of JSON on its standard input."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import Any
from unittest import mock

import sglang_plugin
import torch
from sglang_users import Users
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import Running, TreeEngine
from tierd_client.sglang.tree_pools import EngineShape

from tierd.wire.errors import RefusedError


def serve(engine: TreeEngine, rid: str, tokens: list[int], chunk: int | None = None) -> Any:
    engine.step()
    running = engine.admit(rid, tokens)
    if chunk is None:
        engine.forward(running)
    else:
        engine.forward_in_chunks(running, chunk)
    engine.finish(running)
    return _as_json(running)


def drain(engine: TreeEngine) -> None:
    engine.drain()


def evict(engine: TreeEngine) -> int:
    return engine.evict(window_tokens=1 << 30, states=1 << 10)


def flush_cache(engine: TreeEngine) -> None:
    engine.flush_cache()


def weights_change(engine: TreeEngine) -> None:
    engine.linker.weights_change()
    engine.weights_version += 1


def state(engine: TreeEngine) -> Any:
    engine.tree.sanity_check()
    return {
        "connected": engine.linker.client.connected,
        "free": engine.free_tokens,
        "locked": engine.locked_tokens,
        "unaccounted": sum(engine.unaccounted().values()),
        "kept": engine.linker.stats.kept,
        "offered": engine.linker.stats.offered,
    }


def act(engine: TreeEngine, seed: int, operations: int) -> Any:
    """What users do, at random, and the same on every rank."""
    Users(engine, seed).act(operations)
    return state(engine)


def features(engine: TreeEngine) -> list[str]:
    """What the plugin does in this engine."""
    return sorted(engine.linker.plugin.features)


def iterate(engine: TreeEngine, iterations: int) -> int:
    """So many scheduler iterations. Returns: the all-reduces in them."""
    reduce = torch.distributed.all_reduce
    with mock.patch.object(torch.distributed, "all_reduce", wraps=reduce) as counted:
        for _ in range(iterations):
            engine.step()
    return counted.call_count


def settle(engine: TreeEngine) -> Any:
    """Drain. Returns: the nodes that waited, and the results as the tree took them, look by
    look."""
    wrapper = engine.tree.linker
    nodes = [pending.lock_node_id for pending in wrapper.pending_offloads]
    commit = wrapper.commit_completed_offloads
    with mock.patch.object(wrapper, "commit_completed_offloads", wraps=commit) as looks:
        engine.drain()
    return {"nodes": nodes, "looks": [call.args[0] for call in looks.call_args_list]}


COMMANDS = {
    f.__name__: f
    for f in (
        serve,
        drain,
        evict,
        flush_cache,
        weights_change,
        state,
        act,
        features,
        iterate,
        settle,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("model")
    parser.add_argument("--core", default="python")
    parser.add_argument("--page", type=int, default=4)
    parser.add_argument("--shape", type=json.loads, default={}, help="more of EngineShape")
    parser.add_argument("--group", nargs=3, metavar=("RENDEZVOUS", "RANK", "WORLD"))
    parser.add_argument("--plugin", help="where tierd's metadata is, for SGLang to find its plugin")
    arguments = parser.parse_args()
    group = None
    if arguments.group:
        rendezvous, rank, world = arguments.group
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world)
        )
        group = torch.distributed.group.WORLD
    load_sglang()
    if arguments.plugin:
        sys.path.insert(0, arguments.plugin)
        sglang_plugin.load()
    from sglang.srt.server_args import ServerArgs

    shape = EngineShape(page_tokens=arguments.page, core=arguments.core, **arguments.shape)
    server_args = ServerArgs(model_path=arguments.model)
    try:
        engine = TreeEngine(arguments.socket, shape, server_args=server_args, group=group)
    except RefusedError as error:
        _say(refused=str(error))
        return
    with engine:
        _say(result="ready")
        for line in sys.stdin:
            command, keywords = json.loads(line)
            try:
                _say(result=COMMANDS[command](engine, **keywords))
            except Exception as error:
                _say(error=repr(error))
                raise


def _as_json(running: Running) -> dict[str, Any]:
    return {
        field.name: getattr(running, field.name)
        for field in fields(running)
        if field.name not in ("req", "tokens")
    }


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
