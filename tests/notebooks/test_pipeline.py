"""tools/notebooks.py: edits go the right way, outputs are kept, conflicts refused."""
from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import notebooks
import pytest

BODY = """
# A title

```{code-cell} ipython3
x = 6 * 7
print(x)
```

Words between.

```{code-cell} ipython3
print("unchanged")
```
"""


@pytest.fixture
def pair(tmp_path):
    text, book = tmp_path / "01_a.md", tmp_path / "01_a.ipynb"
    text.write_text(notebooks.HEADER + BODY)
    notebooks.sync(text, book)
    return text, book


def edit_text(text, old, new):
    assert old in text.read_text()
    text.write_text(text.read_text().replace(old, new))


def edit_book(book, old, new):
    notebook = notebooks.read_notebook(book)
    cell = next(c for c in notebook.cells if old in c.source)
    cell.source = cell.source.replace(old, new)
    nbformat.write(notebook, book)


def store_outputs(book):
    """Outputs as a run would leave them, without the run."""
    notebook = notebooks.read_notebook(book)
    for number, cell in enumerate(notebooks.code_cells(notebook), 1):
        cell.execution_count = number
        cell.outputs = [nbformat.v4.new_output("stream", text=f"{number}\n")]
    notebooks.write_notebook(book, notebook)


def test_sync_makes_equal_twins_and_then_changes_nothing(pair):
    text, book = pair
    assert notebooks.content(notebooks.read_text(text)) == notebooks.content(
        notebooks.read_notebook(book)
    )
    before = text.read_bytes(), book.read_bytes()
    os.utime(text, (1, 1))  # time stamps say nothing
    assert notebooks.sync(*pair) == "in step"
    assert (text.read_bytes(), book.read_bytes()) == before


def test_the_setup_cell_comes_first_and_only_once(pair):
    notebooks.sync(*pair)
    cells = notebooks.read_notebook(pair[1]).cells
    assert [notebooks.is_setup(c) for c in cells] == [False, True, False, False, False]
    assert cells[1].source == notebooks.setup_source()


def test_an_old_setup_cell_is_refreshed(pair):
    edit_text(pair[0], "# Setup: installs", "# Setup: once installed")
    notebooks.sync(*pair)
    assert "once installed" not in pair[0].read_text() + pair[1].read_text()


def test_an_edit_of_the_text_reaches_the_notebook_and_keeps_other_outputs(pair):
    text, book = pair
    store_outputs(book)
    edit_text(text, "6 * 7", "6 * 8")
    notebooks.sync(text, book)
    cells = notebooks.code_cells(notebooks.read_notebook(book))
    assert "6 * 8" in cells[1].source
    assert [len(c.outputs) for c in cells] == [1, 0, 1]
    assert [c.execution_count for c in cells] == [1, None, 3]


def test_an_edit_of_the_notebook_reaches_the_text(pair):
    text, book = pair
    edit_book(book, "Words between", "Better words")
    os.utime(text)  # the text is newer, and still not the one that was edited
    notebooks.sync(text, book)
    assert "Better words" in text.read_text()


def test_edits_of_both_are_refused_and_nothing_is_written(pair):
    text, book = pair
    edit_text(text, "Words between", "Words of the text")
    edit_book(book, "Words between", "Words of the notebook")
    before = text.read_bytes(), book.read_bytes()
    with pytest.raises(notebooks.SyncConflict, match="01_a.md .* --prefer"):
        notebooks.sync(text, book)
    assert (text.read_bytes(), book.read_bytes()) == before


@pytest.mark.parametrize("side, words", [("md", "the text"), ("ipynb", "the notebook")])
def test_a_conflict_can_be_decided(pair, side, words):
    text, book = pair
    edit_text(text, "Words between", "Words of the text")
    edit_book(book, "Words between", "Words of the notebook")
    notebooks.sync(text, book, prefer=side)
    assert f"Words of {words}" in text.read_text()
    assert f"Words of {words}" in book.read_text()


def test_the_same_edit_of_both_is_no_conflict(pair):
    edit_text(pair[0], "Words between", "Same words")
    edit_book(pair[1], "Words between", "Same words")
    notebooks.sync(*pair)
    assert notebooks.sync(*pair) == "in step"


def test_a_missing_twin_is_made_again(pair):
    text, book = pair
    before = text.read_text()
    text.unlink()
    notebooks.sync(text, book)
    assert text.read_text() == before


def test_ordinary_pages_are_not_twins(tmp_path):
    (tmp_path / "index.md").write_text("# A page\n")
    assert notebooks.twins(tmp_path) == []


@pytest.mark.slow
def test_execute_numbers_cells_and_stores_outputs(pair):
    book = pair[1]
    assert not notebooks.is_executed(notebooks.read_notebook(book))
    notebooks.execute(book)
    notebook = notebooks.read_notebook(book)
    cells = notebooks.code_cells(notebook)
    assert [c.execution_count for c in cells] == [1, 2, 3]
    assert cells[0].outputs == []  # the setup cell says nothing
    assert cells[1].outputs[0].text == "42\n"
    assert notebooks.is_executed(notebook)
    assert notebook.metadata.language_info.name == "python"
    first = book.read_bytes()
    notebooks.execute(book)
    assert book.read_bytes() == first


@pytest.mark.slow
def test_a_failing_notebook_keeps_its_file(pair):
    text, book = pair
    edit_text(text, "6 * 7", "6 / 0")
    notebooks.sync(text, book)
    before = book.read_bytes()
    with pytest.raises(notebooks.CellExecutionError, match="ZeroDivisionError"):
        notebooks.execute(book)
    assert book.read_bytes() == before


def test_library_hash_follows_imports(tmp_path, monkeypatch):
    package = tmp_path / "opsbyte"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\n")
    (package / "b.py").write_text("X = 1\n")
    (package / "c.py").write_text("X = 1\n")
    monkeypatch.setattr(notebooks, "LIBRARY", tmp_path)
    before = notebooks.library_hash("from opsbyte import a")
    (package / "c.py").write_text("X = 2\n")
    assert notebooks.library_hash("from opsbyte import a") == before
    (package / "b.py").write_text("X = 2\n")
    assert notebooks.library_hash("from opsbyte import a") != before


def test_pieces_of_a_stream_are_joined():
    pieces = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=n, text=t) for n, t in pieces]
    joined = [(o.name, o.text) for o in notebooks.merge_streams(outputs)]
    assert joined == [("stdout", "ab"), ("stderr", "c"), ("stdout", "d")]


def test_paths_are_hidden():
    inside = notebooks.ROOT / "lib"
    assert notebooks.hide_paths(f"saved {inside}") == "saved …/lib"


SHADOW = """
import importlib.util, os, subprocess, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "opsbyte" else find(name)
subprocess.run = lambda command, **options: print("RUN", command[-1])
os.chdir({folder!r})
exec(compile({source!r}, "setup", "exec"))
"""


def run_setup(folder, source):
    """The setup cell in `folder`, as if opsbyte were missing; pip is only printed."""
    code = SHADOW.format(folder=str(folder), source=source)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_setup_installs_from_the_checkout_around_the_notebook(tmp_path):
    (tmp_path / "lib" / "opsbyte").mkdir(parents=True)
    deep = tmp_path / "chapters" / "deep"
    deep.mkdir(parents=True)
    result = run_setup(deep, notebooks.setup_source())
    assert result.stdout.strip() == f"RUN {tmp_path / 'lib'}[all]", result.stderr


def test_setup_installs_from_the_repository_elsewhere(tmp_path):
    template = notebooks.TEMPLATE.read_text()
    source = template.replace("{repository}", "https://example.org/course")
    result = run_setup(tmp_path, source)
    wanted = "RUN opsbyte[all] @ git+https://example.org/course#subdirectory=lib"
    assert result.stdout.strip() == wanted, result.stderr


def test_setup_says_what_to_do_where_there_is_neither(tmp_path):
    source = notebooks.TEMPLATE.read_text().replace("{repository}", "")
    result = run_setup(tmp_path, source)
    assert result.returncode != 0
    assert "Run this notebook inside a checkout" in result.stderr


def test_setup_is_silent_where_opsbyte_is(tmp_path):
    command = [sys.executable, "-c", notebooks.setup_source()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
