"""Tests of the row cache of a router, during rollouts and without shards."""

import re
from pathlib import Path

from e2e.parts_cluster import PARTS, Load, cluster, publish_next, shard_metrics
from running_servers import Running

HITS = re.compile(r"embedserve_row_cache_hits_total\{[^}]*version=\"(\d+)\"[^}]*\} (\S+)")


def hits(router: Running) -> dict[int, float]:
    """Returns the ids found in the row cache, by version."""
    return {int(version): float(count) for version, count in HITS.findall(router.metrics())}


def calls(router: Running) -> float:
    metrics = shard_metrics(router)
    return sum(metrics.get(f"calls {part} ok", 0) for part in range(PARTS))


def test_cached_rows_are_those_of_the_served_version_and_need_no_shards(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_next(store, 1)
    follow = ("--follow", "latest", "--follow-s", "0.2")
    with cluster(store, tmp_path) as one:
        one.start_shards(*follow)
        router = one.start_router(*follow, "--row-cache", 1 << 20)
        with Load(router, [3, 97, 50]) as load:
            load.wait_for(lambda: hits(router)[1] > 0)
            publish_next(store, 2)
            load.wait_for(lambda: hits(router).get(2, 0) > 0)

            def is_without_calls() -> bool:
                before = calls(router)
                load.wait_for_more(20)
                return calls(router) == before

            load.wait_for(is_without_calls)
            for shard in one.shards.values():
                shard.process.kill()
                shard.process.wait()
            load.wait_for_more(20)
        assert not load.wrong
        assert not load.failed
        assert set(load.answers) == {1, 2}
