# Setup: installs the course's library where it is missing (Colab, say).
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

REPOSITORY = "{repository}"
if importlib.util.find_spec("opsbyte") is None:
    parents = [Path.cwd(), *Path.cwd().parents]
    local = [p / "lib" for p in parents if (p / "lib/opsbyte").is_dir()]
    if local:
        source = f"{local[0]}[all]"
    elif REPOSITORY:
        source = f"opsbyte[all] @ git+{REPOSITORY}#subdirectory=lib"
    else:
        raise ModuleNotFoundError(
            "opsbyte is not installed. Run this notebook inside a checkout"
            " of the course, or install the checkout's lib folder with pip."
        )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", source]
    subprocess.run(pip, check=True)
    importlib.invalidate_caches()
