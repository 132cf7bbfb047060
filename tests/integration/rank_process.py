"""An engine of one rank in a process of its own, which does what its stdin says, line by line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tier_harness import DEADLINE_S, Rank, eventually, keys


def main() -> None:
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = Rank(path, **options)
    client, pages = rank.client, rank.pages["kv"]
    print(json.dumps(client.connect(DEADLINE_S)), flush=True)
    for line in sys.stdin:
        what, name, count = json.loads(line)
        names, answer = keys(name, count), None
        if what == "offer":
            pages.compute(names, range(count))
            answer = client.backup([pages.named(names, range(count))], parent=b"")
            client.flush()
        elif what == "ack":
            eventually(lambda: (client.flush(), client.acks())[1], "the next ack")
        elif what == "lookup":
            answer = max(client.lookup(name, b"".join(names)), default=0)
        elif what == "restore":
            pages.wipe(range(count))
            landed = client.restore({name: [pages.named(names, range(count))]}).finish()
            answer = landed and pages.wrong(names, range(count)) == 0
        elif what == "reconnect":
            eventually(lambda: client.flush() or client.connected, "it is connected")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
