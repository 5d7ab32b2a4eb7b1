"""Reads the newest version of a model before the next one is published: its layout, and whether it
is damaged.

Reads no rows, and pulls nothing from a remote store.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from embedserve_store.errors import InvalidModelError, StoreError, UnreachableError
from embedserve_store.format.layout import layout_changes
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_store import ModelStore
from embedserve_store.remote.remote_store import is_url

logger = logging.getLogger(__name__)


def check_layout(manifest: Manifest, store: str) -> None:
    """Raises InvalidModelError if the layout differs from the previous version's.

    Also raises InvalidModelError if the previous version cannot be read for the comparison.
    """
    model = manifest.model
    try:
        models = _published(store, model)
        before = models.manifest(model) if models else None
    except UnreachableError:
        raise
    except StoreError as error:
        raise InvalidModelError(
            f"the version before cannot be compared ({error}): publish without that by "
            "--layout-changed (layout_changed=True)"
        ) from error
    if before is not None and (changes := layout_changes(before, manifest)):
        raise InvalidModelError(
            f"model {model!r} has another layout than version {before.version}: "
            f"{'; '.join(changes)}: if callers know, publish it with --layout-changed "
            "(layout_changed=True)"
        )


def undamaged_before(store: str, model: str) -> Manifest | None:
    """Returns the manifest of the previous version; None if there is none, or it is damaged.

    The sizes of its files and the checksums of the small ones are compared.
    """
    try:
        models = _published(store, model)
        if models is None:
            return None
        before = models.stored(model)
        before.check_small_files()
    except UnreachableError:
        raise
    except StoreError as error:
        logger.warning("%s; the next version is published whether or not it differs", error)
        return None
    return before.manifest


def _published(store: str, model: str) -> ModelStore | None:
    """Returns the store, if it has a version of ``model``."""
    if not is_url(store) and not os.path.isdir(Path(store) / model):
        return None
    models = ModelStore(store)
    return models if models.versions(model) else None
