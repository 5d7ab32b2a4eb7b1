"""Entry point of the processes that connect to Ray: `place` (JSON of PlacementSettings), or
`follow` and `follow-once` (name of the shards, path of the file of addresses)."""

from __future__ import annotations

import json
import os
import sys

from embedserve_store.terminal.console import say


def main(action: str, *values: str) -> None:
    # Read when ray is imported: every line of a shard is shown, once, in plain text.
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        if action == "place":
            from embedserve.processes.ray_backend.placement import PlacementSettings, place

            place(PlacementSettings(**json.loads(values[0])))
        elif action == "follow":
            from embedserve.processes.ray_backend.address_follower import keep_following

            keep_following(*values)
        else:
            from embedserve.processes.ray_backend.address_follower import follow

            follow(*values)
    except (OSError, ValueError) as error:
        say(f"embedserve: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
