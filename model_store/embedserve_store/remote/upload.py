"""Uploads a published version to a remote store, with its manifest last.

Readers do not see the version before its manifest exists. Takes a version's folder and passes its
files to remote_files.py. Never overwrites a version. An interrupted upload leaves files that
readers ignore. Never imports torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.format.version_folder import VERSION_PATTERN
from embedserve_store.local_store import LocalStore
from embedserve_store.remote.pull import MANIFEST, file_names
from embedserve_store.remote.remote_files import RemoteFolder, TransferProgress
from embedserve_store.verification import verify


def upload_version(
    folder: str | os.PathLike[str],
    url: str,
    number: int | None = None,
    progress: TransferProgress | None = None,
) -> str:
    """Uploads STORE/MODEL/VERSION to URL/MODEL/NUMBER, and returns the URL of the version.

    Two concurrent uploads under one number may mix their files, and every reader then rejects the
    version. An object store has no rename that fails for the second upload.

    Args:
        folder: folder of a published version; every byte is checked first.
        url: URL of the store, such as s3://bucket/folder. The bucket must exist.
        number: version number in the remote store; RemoteStore.next_version returns a free number.
            Default: the folder's number.

    Raises:
        StoreError: ``folder`` is not a version or is damaged, or the number is taken.
        UnreachableError: the store cannot be written.
    """
    folder = Path(folder)
    manifest = _verified(folder)
    number = manifest.version if number is None else number
    target = f"{manifest.model}/{number}"
    remote = RemoteFolder(url)
    _check_free(remote, target)
    sizes = {name: (folder / name).stat().st_size for name in file_names(manifest)}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):

        def report(bytes_done: int, name: str = name, size: int = size) -> None:
            if progress:
                progress(name, bytes_done, size)

        remote.upload(folder / name, f"{target}/{name}", report)
    _check_free(remote, target)
    data = json.loads((folder / MANIFEST).read_bytes())
    remote.write(f"{target}/{MANIFEST}", sealed_json(data | {"version": number}))
    return f"{remote.url}/{target}"


def _verified(folder: Path) -> Manifest:
    path = folder.absolute()
    if not VERSION_PATTERN.fullmatch(path.name):
        raise StoreError(f"{folder}: not a published version: its name is not a number")
    version = LocalStore(path.parent.parent).load(path.parent.name, int(path.name))
    verify(version)
    return version.manifest


def _check_free(remote: RemoteFolder, target: str) -> None:
    if MANIFEST in remote.sizes(target):
        raise StoreError(f"{remote.url}/{target}: exists already, and versions never change")
