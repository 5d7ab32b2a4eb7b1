"""An object that creates a folder when it is unpickled."""

import os
from pathlib import Path
from typing import Any


class Marker:
    """Creates the folder ``path`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
