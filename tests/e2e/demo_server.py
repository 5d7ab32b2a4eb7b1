"""The demo model with the files of its training, and a server of it."""

from dataclasses import dataclass
from pathlib import Path

from running_servers import Running, run_warm_command


@dataclass(frozen=True)
class Demo:
    """The demo's folder and a server.

    Attributes:
        folder: store/, demo.pt and the vocabularies demo.TABLE.txt; tests must not change it.
        server: serves the store with its labels, without other options.
    """

    folder: Path
    server: Running

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def vocabularies(self) -> str:
        return ",".join(f"{table}={self.folder}/demo.{table}.txt" for table in ("movie", "user"))


def make_demo(folder: Path) -> None:
    done = run_warm_command("demo", folder / "store", "--checkpoint", folder / "demo.pt")
    assert done.returncode == 0, done.stderr
    assert "RMSE" in done.stderr
