"""A live EmbeddingBagCollection as a source: its tables, its weights, its own answers.

Refuses what is not a plain, whole EmbeddingBagCollection. Changes nothing in the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.goldens import Bags
from embedserve_store.manifest import Manifest, TableSpec

if TYPE_CHECKING:
    import torch
    from torchrec import EmbeddingBagCollection

_UNSUPPORTED = ("num_embeddings_post_pruning", "need_pos", "total_num_buckets", "use_virtual_table")
"""Settings of a config under which an id is not simply a row number."""


def describe(ebc: Any) -> tuple[TableSpec, ...]:
    """The tables of ``ebc`` in its order, as float32.

    Raises:
        InvalidModelError: not an unsharded EmbeddingBagCollection, or a table has a setting
            that the store does not keep.
    """
    _check_collection(ebc)
    return tuple(_table(config) for config in ebc.embedding_bag_configs())


def _check_collection(ebc: Any) -> None:
    from torchrec import EmbeddingBagCollection

    if isinstance(ebc, EmbeddingBagCollection):
        return
    name = type(ebc).__name__
    hint = ""
    if name == "DistributedModelParallel" or name.startswith("Sharded"):
        hint = "; it is sharded: publish from a checkpoint, or from the module before sharding"
    elif hasattr(ebc, "named_modules"):
        paths = [p for p, m in ebc.named_modules() if isinstance(m, EmbeddingBagCollection)]
        hint = f"; it has one at {', '.join(paths)}" if paths else ""
    raise InvalidModelError(f"expected a torchrec EmbeddingBagCollection, found {name}{hint}")


def _table(config: Any) -> TableSpec:
    for setting in _UNSUPPORTED:
        if getattr(config, setting, None):
            raise InvalidModelError(
                f"table {config.name!r}: {setting} is {getattr(config, setting)}, "
                "the store keeps plain tables only"
            )
    return TableSpec(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=tuple(config.feature_names),
        pooling=str(config.pooling.value).lower(),
        dtype="float32",
    )


def weights_of(ebc: EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    return {name: bag.weight for name, bag in ebc.embedding_bags.items()}


def can_answer(ebc: EmbeddingBagCollection) -> bool:
    """Whether the module itself gives float32 answers.

    torch refuses a weighted mean, and adds float16 rows up in float16.
    """
    import torch

    configs = ebc.embedding_bag_configs()
    weighted_mean = ebc.is_weighted() and any(c.pooling.value == "MEAN" for c in configs)
    return not weighted_mean and all(w.dtype == torch.float32 for w in weights_of(ebc).values())


def answers(ebc: EmbeddingBagCollection, manifest: Manifest, bags: Bags) -> NDArray[np.float32]:
    """What the module itself answers to ``bags``, float32 [B, sum of dims] in its key order."""
    import torch
    from torchrec import KeyedJaggedTensor

    device = next(iter(weights_of(ebc).values())).device
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
