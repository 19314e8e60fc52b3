"""`pytest --nbval`, as the course sets it, notices what it must and only that."""
from __future__ import annotations

import re
import subprocess
import sys

import nbformat
import notebooks
import pytest

DRAW = "import matplotlib.pyplot as plt\nplt.subplots()\nplt.show()"
WARN = "import warnings\nwarnings.warn('careful')"
IGNORE = "nbval-ignore-output"


def printed(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


FIGURE = nbformat.v4.new_output(
    "display_data",
    {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 640x480 with 1 Axes>"},
)
# name: (does it pass, source, stored outputs, tag)
CELLS = {
    "equal": (True, "print(6 * 7)", [printed("42\n")], None),
    "other pixels": (True, DRAW, [FIGURE], None),
    "ignored": (True, "print(id(object()))", [printed("1\n")], IGNORE),
    "other text": (False, "print(6 * 7)", [printed("43\n")], None),
    "other digits": (False, "print(0.3000001)", [printed("0.3\n")], None),
    "output gone": (False, "x = 1", [printed("42\n")], None),
    "new output": (False, "print(42)", [], None),
    "new figure": (False, DRAW, [], None),
    "a warning": (False, WARN, [], None),
    "an assertion": (False, "assert 1 > 2", [], IGNORE),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Numbers of the cells that fail when all of CELLS run in one notebook."""
    cells = [
        nbformat.v4.new_code_cell(
            source,
            outputs=outputs,
            execution_count=number,  # nbval does not compare cells that never ran
            metadata={"tags": [tag]} if tag else {},
        )
        for number, (_, source, outputs, tag) in enumerate(CELLS.values(), 1)
    ]
    file = tmp_path_factory.mktemp("nbval") / "cells.ipynb"
    notebooks.write_notebook(file, nbformat.v4.new_notebook(cells=cells))
    options = ["--nbval", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", "pyproject.toml", file],
        cwd=notebooks.ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert f"{len(CELLS)} items" in result.stdout, result.stdout
    return set(map(int, re.findall(r"^FAILED .*::Cell (\d+)", result.stdout, re.M)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CELLS)), ids=list(CELLS))
def test_nbval(failed, number):
    passes = list(CELLS.values())[number][0]
    assert (number not in failed) == passes
