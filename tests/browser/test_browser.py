"""What a real browser does with the book: run where Chromium is, skipped elsewhere."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import browser
import notebooks
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser.find_chromium() is None,
        reason="no Chromium on this machine; tests/book checks the pages' text instead",
    ),
]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The book, built from nothing."""
    target = tmp_path_factory.mktemp("book")
    tool = Path(sys.executable).with_name("jupyter-book")
    command = [tool, "build", "--all", "--path-output", target, notebooks.ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return target / "_build" / "html"


@pytest.fixture(scope="module")
def address(html):
    with browser.serve(html) as address:
        yield address


@pytest.fixture(scope="module")
def page():
    with browser.browser() as page:
        yield page


@pytest.fixture(scope="module")
def names(html):
    files = [*html.glob("chapters/*.html"), html / "search.html"]
    return sorted(file.relative_to(html).as_posix() for file in files)


def test_no_page_asks_another_host_for_anything(page, address, names):
    page.look()
    for name in names:
        page.open(f"{address}/{name}")
        asked = page.requested()
        assert len(asked) > 3, "the record of requests is empty"
        outside = [url for url in asked if not url.startswith(address)]
        assert not outside, f"{name} asked {outside}"


def test_no_script_fails_and_no_file_is_missing(page, address, names):
    for name in names:
        page.open(f"{address}/{name}")
        assert not page.complaints(), name


def test_every_formula_is_typeset(page, address, names):
    total = 0
    for name in names:
        page.open(f"{address}/{name}")
        count = "document.querySelectorAll('{}').length".format
        formulas = page.evaluate(count(".math.tex"))
        set_ = page.evaluate(count(".math.tex:has(> .katex, > .katex-display)"))
        assert set_ == formulas, name
        assert page.evaluate(count(".katex-error")) == 0, name
        total += formulas
    assert total, "no page has a formula: the check saw nothing"


def test_a_formula_keeps_the_punctuation_beside_it(page, address, names):
    held = 0
    for name in names:
        page.open(f"{address}/{name}")
        loose, tied = page.evaluate("""(() => {
          const ends = [...document.querySelectorAll("span.math.tex")].filter(
            formula => /^[.,;:!?)]/.test(formula.nextSibling?.data ?? ""));
          const tied = ends.filter(formula =>
            getComputedStyle(formula.parentElement).whiteSpace === "nowrap");
          return [ends.length - tied.length, tied.length]; })()""")
        assert loose == 0, f"{name}: {loose} formulas may lose their comma"
        held += tied
    assert held, "no formula ends a clause: the check saw nothing"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_page_scrolls_sideways(page, address, names, width):
    page.look(width=width)
    for name in names:
        page.open(f"{address}/{name}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} pixels wide in a window of {width}"


def test_the_dark_theme_follows_the_reader(page, address, names):
    for dark, theme in ((True, "dark"), (False, "light")):
        page.look(dark=dark)
        page.open(f"{address}/{names[0]}")
        assert page.evaluate("document.documentElement.dataset.theme") == theme


def test_search_finds_a_word(page, address):
    page.look()
    page.open(f"{address}/search.html?q=inference")
    waiting = """new Promise(done => { const look = () => {
      const found = document.querySelectorAll('#search-results li a').length;
      found || performance.now() > 10000 ? done(found) : setTimeout(look, 50); };
      look(); })"""
    assert page.evaluate(waiting) > 0


def test_the_record_shows_a_request_to_another_host(page, address, html):
    (html / "outside.html").write_text("<img src='http://localhost:9/a.png' alt='x'>")
    page.open(f"{address}/outside.html")
    assert "http://localhost:9/a.png" in page.requested()
    assert page.complaints()
