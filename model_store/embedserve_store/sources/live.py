"""A live, unsharded collection as a source: its tables, its rows, its own answers.

Refuses what is not a plain, whole EmbeddingBagCollection or EmbeddingCollection. Changes nothing
in the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.sources.rows import TableRows, TensorRows

if TYPE_CHECKING:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

_UNSUPPORTED = ("num_embeddings_post_pruning", "need_pos", "total_num_buckets", "use_virtual_table")
"""Settings of a config under which an id is not simply a row number."""


def describe(collection: Any) -> tuple[TableSpec, ...]:
    """The tables of ``collection`` in its order, as float32.

    Raises:
        InvalidModelError: not an unsharded EmbeddingBagCollection or EmbeddingCollection, or a
            table has a setting that the store does not keep.
    """
    _check_collection(collection)
    if is_pooled(collection):
        return tuple(map(table_of, collection.embedding_bag_configs()))
    return tuple(map(table_of, collection.embedding_configs()))


def is_pooled(collection: EmbeddingBagCollection | EmbeddingCollection) -> bool:
    return hasattr(collection, "embedding_bag_configs")


def _check_collection(module: Any) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    if isinstance(module, kinds):
        return
    name = type(module).__name__
    hint = ""
    if name == "DistributedModelParallel" or name.startswith("Sharded"):
        hint = "; it is sharded: publish_sharded takes it, on all its ranks"
    elif hasattr(module, "named_modules"):
        paths = [path for path, inner in module.named_modules() if isinstance(inner, kinds)]
        hint = f"; it has one at {', '.join(paths)}" if paths else ""
    raise InvalidModelError(
        f"expected a torchrec EmbeddingBagCollection or EmbeddingCollection, found {name}{hint}"
    )


def table_of(config: Any) -> TableSpec:
    """The table of an EmbeddingBagConfig or EmbeddingConfig, as float32.

    Raises:
        InvalidModelError: it has a setting that the store does not keep.
    """
    for setting in _UNSUPPORTED:
        if getattr(config, setting, None):
            raise InvalidModelError(
                f"table {config.name!r}: {setting} is {getattr(config, setting)}, "
                "the store keeps plain tables only"
            )
    pooling = getattr(config, "pooling", None)
    return TableSpec(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=tuple(config.feature_names),
        pooling=str(pooling.value).lower() if pooling else "none",
        dtype="float32",
    )


def weights_of(collection: EmbeddingBagCollection | EmbeddingCollection) -> dict[str, TableRows]:
    """The rows of every table, by table name."""
    tables = collection.embedding_bags if is_pooled(collection) else collection.embeddings
    return {name: TensorRows(table.weight) for name, table in tables.items()}


def can_answer(ebc: EmbeddingBagCollection) -> bool:
    """Whether the module itself gives float32 answers.

    torch refuses a weighted mean, and adds float16 rows up in float16.
    """
    configs = ebc.embedding_bag_configs()
    weighted_mean = ebc.is_weighted() and any(c.pooling.value == "MEAN" for c in configs)
    return not weighted_mean and all(rows.dtype == "float32" for rows in weights_of(ebc).values())


def answers(ebc: EmbeddingBagCollection, manifest: Manifest, bags: Bags) -> NDArray[np.float32]:
    """What the module itself answers to ``bags``, float32 [B, sum of dims] in its key order."""
    import torch
    from torchrec import KeyedJaggedTensor

    device = next(iter(ebc.embedding_bags.values())).weight.device
    weights = None if bags.weights is None else torch.from_numpy(bags.weights).to(device)
    features = KeyedJaggedTensor(
        keys=list(manifest.features),
        values=torch.from_numpy(bags.ids).to(device),
        lengths=torch.from_numpy(bags.lengths.reshape(-1)).to(device),
        weights=weights,
    )
    with torch.no_grad():
        result: NDArray[np.float32] = ebc(features).values().float().cpu().numpy()
    return result
