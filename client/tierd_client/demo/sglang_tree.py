"""SGLang's real radix tree as the demo's workload. Prints JSON lines, as the demo's ranks do.

Started by `tierd demo --sglang`.
"""

from __future__ import annotations

import argparse
import json

from tierd_client.sglang import demo


def main() -> None:
    """Serve the demo's conversations as one engine."""
    parser = argparse.ArgumentParser(
        prog="python -m tierd_client.demo.sglang_tree", description=__doc__
    )
    parser.add_argument("--socket", required=True)
    result = demo.run(parser.parse_args().socket, progress=_progress)
    print(json.dumps({"result": result}), flush=True)


def _progress(done: float, text: str) -> None:
    print(json.dumps({"done": done, "text": text}), flush=True)


if __name__ == "__main__":
    main()
