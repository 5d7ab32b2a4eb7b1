"""Reads a live, unsharded collection: its tables, its rows and its outputs.

Finds the collection in the module that holds it. Rejects anything but a plain, whole
EmbeddingBagCollection or EmbeddingCollection. Changes nothing in the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.sources import rows
from embedserve_store.sources.prefix import at_prefix, shown
from embedserve_store.sources.rows import TableRows, TensorRows

if TYPE_CHECKING:
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

_CHANGES_LOOKUPS = ("FeatureProcessed", "ITEP")
"""Substrings in names of modules that change ids or weights before the collection's lookup."""


def collection_in(module: Any, prefix: str = "") -> Any:
    """Returns the unsharded EmbeddingBagCollection or EmbeddingCollection in ``module``.

    ``module`` may itself be the collection.

    Args:
        prefix: selects the collection if there are several (prefix.py).

    Raises:
        InvalidModelError: there is no collection, or several, or another module changes the
            collection's ids or shards its tables.
    """
    modules = module.named_modules() if hasattr(module, "named_modules") else ()
    everywhere = {path: inner for path, inner in modules if is_collection(inner)}
    found = at_prefix(everywhere, prefix)
    if len(found) == 1:
        check_ids_unchanged(module, found[0])
        _check_whole(everywhere[found[0]])
        return everywhere[found[0]]
    name = type(module).__name__
    under = f" under {prefix!r}" if prefix else ""
    hint = ""
    if everywhere:
        hint = f"; it has one at {', '.join(shown(everywhere))}: choose one with prefix"
    elif name == "DistributedModelParallel" or name.startswith("Sharded"):
        hint = "; it is sharded: publish_sharded takes it, on all its ranks"
    elif other := _other_collection(module):
        name, hint = other, ": publish the collection that was trained, or its state dict"
    raise InvalidModelError(
        f"expected one torchrec EmbeddingBagCollection or EmbeddingCollection{under}, found {name}"
        f"{hint}"
    )


def _check_whole(collection: EmbeddingBagCollection | EmbeddingCollection) -> None:
    """Raises InvalidModelError unless each table of ``collection`` is a whole, plain parameter."""
    import torch

    for name, table in _modules_of(collection).items():
        if type(table.weight) is not torch.nn.Parameter or table.weight.dim() != 2:
            raise InvalidModelError(
                f"table {name!r}: its weight is a {type(table.weight).__name__} of shape "
                f"{list(table.weight.shape)}, not a whole parameter, for example because FSDP "
                "shards it: save the model with torch.distributed.checkpoint and publish that"
            )


def _other_collection(module: Any) -> str:
    """Returns the class and path of a quantized or fused collection in ``module``, or ""."""
    modules = module.named_modules() if hasattr(module, "named_modules") else ()
    for path, inner in modules:
        kind = type(inner)
        if kind.__name__.endswith(("EmbeddingBagCollection", "EmbeddingCollection")):
            return f"{kind.__module__}.{kind.__name__}" + (f" at {path}" if path else "")
    return ""


def describe(collection: EmbeddingBagCollection | EmbeddingCollection) -> tuple[TableSpec, ...]:
    """Returns the tables of ``collection`` in its order, as float32.

    Raises:
        InvalidModelError: a table has a setting that the store does not support.
    """
    if is_pooled(collection):
        return tuple(map(table_of, collection.embedding_bag_configs()))
    return tuple(map(table_of, collection.embedding_configs()))


def is_pooled(collection: EmbeddingBagCollection | EmbeddingCollection) -> bool:
    return hasattr(collection, "embedding_bag_configs")


def is_weighted(collection: EmbeddingBagCollection | EmbeddingCollection) -> bool:
    return is_pooled(collection) and bool(collection.is_weighted())


def is_collection(module: Any) -> bool:
    """Returns whether ``module`` is an unsharded EmbeddingBagCollection or EmbeddingCollection."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    return isinstance(module, EmbeddingBagCollection | EmbeddingCollection)


def check_ids_unchanged(root: torch.nn.Module, path: str) -> None:
    """Raises InvalidModelError if a module around the collection changes its ids or weights.

    ``path`` is the path of the collection in ``root``.
    """
    parts = path.split(".") if path else []
    for i in range(len(parts)):
        around = type(root.get_submodule(".".join(parts[:i]))).__name__
        inside = f"the collection at {path} is inside a {around}"
        if "ManagedCollision" in around:
            raise InvalidModelError(
                f"{inside}, which maps ids to rows: pass the collection itself, with a vocabulary "
                "from id to row for each table (a DeltaWriter pushes its rows by push_rows alone)"
            )
        if any(word in around for word in _CHANGES_LOOKUPS):
            raise InvalidModelError(
                f"{inside}, which changes ids or weights before they are looked up: only its rows "
                "could be served"
            )


def table_of(config: Any) -> TableSpec:
    """Returns the table of an EmbeddingBagConfig or EmbeddingConfig, as float32.

    Raises:
        InvalidModelError: the config has a setting that the store does not support.
    """
    if getattr(config, "use_virtual_table", False):
        raise InvalidModelError(
            f"table {config.name!r}: use_virtual_table is True: its rows are stored by id, "
            "and only a table of numbered rows can be published"
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
    """Returns the rows of every table, by table name."""
    return {name: TensorRows(table.weight) for name, table in _modules_of(collection).items()}


def _modules_of(collection: EmbeddingBagCollection | EmbeddingCollection) -> Any:
    """Returns the modules of the tables, by table name."""
    return collection.embedding_bags if is_pooled(collection) else collection.embeddings


def checksums_of(
    collection: EmbeddingBagCollection | EmbeddingCollection,
) -> dict[str, NDArray[np.uint64]]:
    """Returns the checksum of each row (row_checksums.py), by table name."""
    return {name: rows.checksums_of(table) for name, table in weights_of(collection).items()}


def can_answer(ebc: EmbeddingBagCollection) -> bool:
    """Returns whether the module itself can compute float32 outputs.

    torch rejects a weighted mean, and sums float16 rows in float16.
    """
    is_float32 = all(rows.dtype == "float32" for rows in weights_of(ebc).values())
    return is_float32 and not _is_weighted_mean(ebc)


def check_can_answer(collection: EmbeddingBagCollection | EmbeddingCollection) -> None:
    """Raises InvalidModelError if torch cannot compute the outputs of ``collection``."""
    if is_pooled(collection) and _is_weighted_mean(collection):
        raise InvalidModelError("torch's EmbeddingBag has no answers of a weighted mean")


def _is_weighted_mean(ebc: EmbeddingBagCollection) -> bool:
    configs = ebc.embedding_bag_configs()
    return ebc.is_weighted() and any(config.pooling.value == "MEAN" for config in configs)


def answers(collection: Any, manifest: Manifest, bags: Bags) -> NDArray[np.float32]:
    """Returns the outputs of a collection, sharded or not, for ``bags``.

    Returns:
        float32 [B, sum of dims] in the order of the manifest's keys. For an EmbeddingCollection [N,
        dim]: key by key, one row for each id.
    """
    result: NDArray[np.float32] = outputs(collection, manifest, bags).float().cpu().numpy()
    return result


def outputs(collection: Any, manifest: Manifest, bags: Bags) -> torch.Tensor:
    """Returns what ``answers`` returns, on the collection's device and in its dtype."""
    import torch
    from torchrec import KeyedJaggedTensor

    device = _device_of(collection)
    features = KeyedJaggedTensor(
        keys=list(manifest.features),
        values=torch.from_numpy(bags.ids).to(device),
        lengths=torch.from_numpy(bags.lengths.reshape(-1)).to(device),
        weights=None if bags.weights is None else torch.from_numpy(bags.weights).to(device),
    )
    with torch.no_grad():
        found = collection(features)
        if hasattr(found, "wait"):
            found = found.wait()
        if manifest.is_pooled:
            return torch.cat([found[key] for key in manifest.keys], dim=1)
        return torch.cat([found[key].values() for key in manifest.keys])


def _device_of(collection: Any) -> torch.device:
    """Returns the device that the collection's ids must be on."""
    if is_collection(collection):
        device: torch.device = next(collection.parameters()).device
    else:
        device = collection._device
    return device
