"""An object that shows that it was unpickled: by a folder that is then there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Marker:
    """Unpickling it makes the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
