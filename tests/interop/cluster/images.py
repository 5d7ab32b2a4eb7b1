"""Images that a node imports from a file, because it reaches no registry."""

import io
import tarfile
from pathlib import Path

from interop.tools import run_tool, tool

PAUSE = "localhost/embedserve-pause:bookworm"
"""First container of a pod, which holds its network; it contains only Debian's catatonit."""
SAVE_S_MAX = 900


def save_images(path: Path, *names: str) -> None:
    """Writes these images of podman, and the pause image, into one archive."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        files.add(tool("catatonit"), "pause", filter=_owned_by_root)
    change = ("--change", 'ENTRYPOINT ["/pause", "-P"]')
    run_tool("podman", "import", "--quiet", *change, "-", PAUSE, stdin=layer.getvalue())
    save = ("save", "--quiet", "--multi-image-archive", "--output", path)
    run_tool("podman", *save, PAUSE, *names, limit_s=SAVE_S_MAX)
    run_tool("podman", "image", "rm", PAUSE)


def _owned_by_root(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    return file
