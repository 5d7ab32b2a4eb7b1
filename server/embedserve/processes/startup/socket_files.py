"""Unix sockets that a server listens on, by their files: creates them, detects stale ones, removes
them.

A file is replaced only if it is a socket without a listener, as left behind by a killed server. Its
folder is locked meanwhile, so that of two servers that start together only one gets the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from embedserve.wire.listener import BACKLOG

LOCK_S_MAX = 1.0
"""Seconds for which another process may keep the folder locked. Servers hold the lock only while
they create or remove a file, which takes a moment."""
LOCK_POLL_S = 0.01


@dataclass(frozen=True)
class SocketFile:
    """A listening Unix socket and its file.

    Attributes:
        owner_pid: process that created the socket and that alone removes the file; its forked
            processes listen on the same socket.
    """

    path: str
    sock: socket.socket
    device: int
    inode: int
    owner_pid: int

    def remove(self) -> None:
        """Removes the file, so that no new client connects. Established connections are still
        accepted. A file of another server, such as the next one, is left alone."""
        if os.getpid() != self.owner_pid:
            return
        with contextlib.suppress(OSError), _locked(_folder_of(self.path)):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)

    def close(self) -> None:
        self.remove()  # while the socket is open, so that its inode is not reused
        self.sock.close()


def listen_at(path: str, mode: int, protocol: str) -> SocketFile:
    """Listens at ``path``, a file that gets ``mode``; errors name it by its ``protocol``.

    Raises:
        OSError: a server listens there, the file is not a socket, or the folder is missing or not
            writable.
    """
    try:
        with _locked(_folder_of(path)):
            _clear(path)
            return _bind(path, mode)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on unix:{path} ({protocol}): {reason}") from error


def _bind(path: str, mode: int) -> SocketFile:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), mode)  # before there is a file, so that it never permits more
        sock.bind(path)
        os.chmod(path, mode)  # restores the bits that the umask removed
        sock.listen(BACKLOG)
        found = os.lstat(path)
    except OSError:
        sock.close()
        raise
    return SocketFile(path, sock, found.st_dev, found.st_ino, os.getpid())


def _clear(path: str) -> None:
    """Removes a socket without a listener; raises OSError for a file that is no socket. A socket in
    use stays there, so that it cannot be bound."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("a file is there that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):  # both: it is in use
                raise


def _folder_of(path: str) -> str:
    return os.path.dirname(path) or "."


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keeps other servers from creating or removing sockets in ``folder`` within its block."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OSError(f"there is no folder {folder}") from error
    try:
        end_s = time.monotonic() + LOCK_S_MAX
        while not _is_locked(descriptor):
            if time.monotonic() > end_s:
                raise OSError(f"another process keeps the folder {folder} locked")
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
