"""Samples goldens from the rows of a part, because those of the version span all parts.

Never imports torch.
"""

from __future__ import annotations

from embedserve_store.format.manifest import Manifest
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.goldens.sampled_bags import sample_bags


def part_goldens(manifest: Manifest, tables: TablesFile) -> Goldens:
    """Returns bags of the part's row numbers with the results of the reference pooling.

    Equal manifests give equal bags, and each table has its first and its last row that requests can
    reach in them. Both results are those of the stored rows: the source model's results for these
    bags are unknown.

    Args:
        manifest: manifest of the part.
    """
    bags = sample_bags(manifest, {})
    results = pool_stored(manifest, bags, bags.ids, tables)
    return Goldens(bags, results, results)
