"""Where downloads and measurements are kept between runs."""
from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The course's cache directory, made if it is missing.

    `OPSBYTE_CACHE` overrides the platform's user cache directory.
    """
    if override := os.environ.get("OPSBYTE_CACHE"):
        path = Path(override).expanduser()
    elif sys.platform == "darwin":
        path = Path.home() / "Library" / "Caches" / "opsbyte"
    elif sys.platform == "win32":
        path = Path(os.environ.get("LOCALAPPDATA", Path.home())) / "opsbyte"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(base) / "opsbyte"
    path.mkdir(parents=True, exist_ok=True)
    return path
