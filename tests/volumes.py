"""Small volumes that fill up, become read-only or stall, in a mount namespace of their own."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOL_S_MAX = 60
REMOUNT_PAUSE_S = 0.01
UNSHARE = ("unshare", "--mount", "--propagation", "private")
TOOLS = ("fsfreeze", "mkfs.ext4", "mount", "nsenter", "unshare")
DISK_BYTES = 64 << 20


def can_mount() -> bool:
    """Returns whether this process may mount volumes, which an unrestricted root may."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        return False
    tried = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(tried, capture_output=True, timeout=TOOL_S_MAX).returncode == 0


def can_freeze() -> bool:
    """Returns whether this process may also mount a file as a disk that can be frozen."""
    return can_mount() and Path("/dev/loop-control").exists()


@dataclass(frozen=True)
class Volume:
    """A file system at ``folder`` that only processes in its mount namespace see.

    Attributes:
        files: path of the folder for this process.
        enter: command prefix that enters the namespace.
        mounts: path of the mount namespace, for forkserver.
    """

    folder: Path
    files: Path
    enter: tuple[str, ...]
    mounts: str

    def run(self, *words: object) -> None:
        """Runs a command in the mount namespace."""
        subprocess.run([*self.enter, *map(str, words)], check=True, timeout=TOOL_S_MAX)

    def remount(self, options: str) -> None:
        """Changes the mount options of a tmpfs: "ro", "rw", "size=4m", "nr_inodes=9".

        The kernel rejects the change while a process has a file open for writing, or uses more than
        the options allow. A server does so only for moments, so that this method retries.
        """
        end_s = time.monotonic() + TOOL_S_MAX
        while True:
            try:
                return self.run("mount", "-o", f"remount,{options}", self.folder)
            except subprocess.CalledProcessError:
                if time.monotonic() >= end_s:
                    raise
            time.sleep(REMOUNT_PAUSE_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Freezes the disk inside the context: every write blocks."""
        self.run("fsfreeze", "--freeze", self.folder)
        try:
            yield
        finally:
            self.run("fsfreeze", "--unfreeze", self.folder)


@contextmanager
def _namespace(folder: Path) -> Iterator[Volume]:
    """Yields ``folder`` in a mount namespace that ends with the last process in it."""
    folder.mkdir()
    # The namespace exists once the process prints a line.
    command = [*UNSHARE, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        enter = ("nsenter", f"--target={holder.pid}", "--mount", f"--wd={os.getcwd()}")
        yield Volume(
            folder, Path(f"/proc/{holder.pid}/root{folder}"), enter, f"/proc/{holder.pid}/ns/mnt"
        )


@contextmanager
def memory_volume(folder: Path, options: str) -> Iterator[Volume]:
    """Mounts an empty tmpfs at ``folder``."""
    with _namespace(folder) as volume:
        volume.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", folder)
        yield volume


@contextmanager
def disk_volume(folder: Path) -> Iterator[Volume]:
    """Mounts an empty disk of DISK_BYTES at ``folder``; its image file is next to the folder."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    with _namespace(folder) as volume:
        volume.run("mkfs.ext4", "-q", "-F", image)
        volume.run("mount", "-o", "loop", image, folder)
        yield volume
