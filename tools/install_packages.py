"""Runs `pip install` with its own arguments, and prints a line for each package that pip takes:
name, size and seconds. Errors and exit status are pip's.

    python tools/install_packages.py --editable clients
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TAKEN = re.compile(
    r"\s*(Downloading|Using cached|Processing) (\S+(?:\.whl|\.tar\.gz))(?: \((.+)\))?$"
)
"""A package file in pip's output. Files of metadata alone end with .metadata."""
INSTALLING = "Installing collected packages: "


def steps(lines: Iterator[str]) -> Iterator[str]:
    """Yields what pip begins with each line, or "" for a line that only ends the step before."""
    for line in lines:
        if found := TAKEN.match(line):
            verb, path, size = found.groups()
            file = Path(path).name
            name, version = (
                file.split("-")[:2] if file.endswith(".whl") else file[:-7].rsplit("-", 1)
            )
            if verb == "Processing":  # a file on this host
                size = f"{Path(path.removeprefix('file://')).stat().st_size / 1e6:.1f} MB, here"
            elif verb == "Using cached":
                size += ", cached"
            yield f"{name} {version} ({size})"
        elif line.startswith(INSTALLING):
            yield f"unpacking {line.count(',') + 1} packages"
            for _ in lines:  # until pip ends
                pass
            yield ""
        else:
            yield ""


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *sys.argv[1:]]
    begin = started = time.monotonic()
    is_open = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for step in steps(iter(pip.stdout)):
            now = time.monotonic()
            if is_open:
                print(f" {now - started:.1f} s", flush=True)
            if step:
                print(f"  {step} …", end="", flush=True)
            is_open, started = bool(step), now
    print(f"  {time.monotonic() - begin:.0f} s in all")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
