"""Every notebook keeps the rules that make it readable, and true, everywhere.

Each check is a function of a chapter that returns its problems in words. The second
half of the file breaks a good chapter in the way that each check is for: a check that
cannot fail proves nothing.
"""
from __future__ import annotations

import ast
import copy
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import nbformat
import notebooks
import pytest
from markdown_it import MarkdownIt

MAX_BYTES = 1_000_000
MAX_LINES, MAX_COLUMNS, MAX_MEDIAN = 30, 79, 8
WORDS = 800, 3600
FORBIDDEN_TAGS = (
    "nbval-skip", "nbval-raises-exception", "raises-exception", "skip-execution"
)  # fmt: skip
MARKDOWN = MarkdownIt("commonmark").enable("table")
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~/:)\]}-])/(?:home|root|Users|tmp|var|opt|usr|mnt|srv|work|private)"
    r"(?:/|\b(?=['\"\s]))|\b[A-Z]:\\{1,2}\w"
)
RAW_MARKUP = re.compile(
    r"^\s*(?:`{3,}|~{3,}|:{3,})\s*\{|(?<!`)\{[\w:+-]+\}`|^\([\w-]+\)=\s*$|^\+\+\+",
    re.MULTILINE,
)


@dataclass
class Chapter:
    """A pair of twins, read from disk."""

    text_file: Path
    file: Path

    def __post_init__(self):
        self.notebook = notebooks.read_notebook(self.file)
        self.cells = self.notebook.cells
        self.code = [c for c in self.cells if c.cell_type == "code"]
        self.markdown = [c for c in self.cells if c.cell_type == "markdown"]

    @property
    def is_numbered(self) -> bool:
        return self.file.stem[:2].isdigit()


def where(chapter: Chapter, cell) -> str:
    first = next(iter(cell.source.strip().splitlines()), "(empty)")
    return f"cell {chapter.cells.index(cell)} ({first[:50]!r})"


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def outputs(chapter: Chapter):
    for cell in chapter.code:
        for output in cell.get("outputs", []):
            yield cell, output


def output_texts(output) -> list[str]:
    """All text that an output shows."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [*output.traceback, output.evalue]
    return [v for k, v in output.data.items() if k.startswith("text/") or "svg" in k]


def tokens(source: str):
    """Every Markdown token, inline ones included."""
    for token in MARKDOWN.parse(source):
        yield token
        yield from token.children or []


def headings(source: str) -> list[tuple[int, str]]:
    found = []
    flat = MARKDOWN.parse(source)
    for token, inline in zip(flat, flat[1:], strict=False):
        if token.type == "heading_open":
            found.append((int(token.tag[1]), inline.content))
    return found


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and the book make it."""
    plain = re.sub(r"[^\w\- ]", "", title.lower().strip())
    return plain.replace(" ", "-")


# ---- the checks ------------------------------------------------------------


def twins_are_equal(chapter):
    """The text twin has the same cells as the notebook."""
    if not chapter.text_file.exists():
        return [f"{chapter.text_file.name} is missing: run make sync"]
    text = notebooks.content(notebooks.read_text(chapter.text_file))
    book = notebooks.content(chapter.notebook)
    if text == book:
        return []
    for number, (ours, theirs) in enumerate(zip(text, book, strict=False)):
        if ours != theirs:
            return [f"cell {number} differs: {ours[1][:60]!r} and {theirs[1][:60]!r}"]
    return [f"{len(text)} cells in the text, {len(book)} in the notebook"]


def counts_are_one_to_n(chapter):
    """The stored run was one run, from the first cell to the last."""
    counts = [c.execution_count for c in chapter.code if c.source.strip()]
    good = counts == list(range(1, len(counts) + 1))
    return [] if good else [f"execution counts are {counts}: run make execute"]


def nothing_on_stderr(chapter):
    """No warning and no progress noise in what is stored."""
    return [
        f"{where(chapter, cell)} wrote to stderr: {output.text[:80]!r}"
        for cell, output in outputs(chapter)
        if output.output_type == "stream" and output.name == "stderr"
    ]


def no_errors(chapter):
    """No stored cell failed."""
    return [
        f"{where(chapter, cell)} raised {output.ename}"
        for cell, output in outputs(chapter)
        if output.output_type == "error"
    ]


def markdown_is_plain(chapter):
    """No directive, role or label, which other viewers show raw."""
    return [
        f"{where(chapter, cell)} has raw markup {match.group(0)!r}"
        for cell in chapter.markdown
        for match in RAW_MARKUP.finditer(cell.source)
    ]


def no_absolute_paths(chapter):
    """Nothing names a place on one machine, in sources or in outputs."""
    texts = [(cell, cell.source) for cell in chapter.cells]
    texts += [(cell, t) for cell, out in outputs(chapter) for t in output_texts(out)]
    here = [str(notebooks.ROOT), str(Path.home())]
    problems = []
    for cell, text in texts:
        match = ABSOLUTE_PATH.search(text)
        if match or any(len(path) > 5 and path in text for path in here):
            found = text[match.start():][:40] if match else "this checkout or home"
            problems.append(f"{where(chapter, cell)} has an absolute path: {found!r}")
    return problems


def no_object_addresses(chapter):
    """No default representation of an object: it tells a reader nothing."""
    return [
        f"{where(chapter, cell)} shows an object's address: end it with plt.show()"
        for cell, output in outputs(chapter)
        for text in output_texts(output)
        if re.search(r"at 0x[0-9a-f]{6,}", text)
    ]


def has_figure(cell) -> bool:
    return any(
        kind.startswith("image/")
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    )


def alt_text(cell) -> str:
    return cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")


def figures_have_alt_text(chapter):
    """A reader who cannot see a figure is told its finding."""
    problems = [
        f"{where(chapter, cell)} draws a figure without alt text of at least four words"
        for cell in chapter.code
        if has_figure(cell) and len(alt_text(cell).split()) < 4
    ]
    problems += [
        f"{where(chapter, cell)} has an image without alt text"
        for cell in chapter.markdown
        for token in tokens(cell.source)
        if token.type == "image" and not token.content.strip()
    ]
    return problems


def figures_have_captions(chapter):
    """A sentence of Markdown follows a figure; only folded checks may come between."""
    problems = []
    for number, cell in enumerate(chapter.cells):
        if cell.cell_type != "code" or not has_figure(cell):
            continue
        rest = iter(chapter.cells[number + 1:])
        after = next((c for c in rest if "hide-cell" not in tags(c)), None)
        text = after.source.lstrip() if after and after.cell_type == "markdown" else ""
        if not text or text.startswith(("#", "|", "```", "$$", "!")):
            problems.append(f"{where(chapter, cell)} draws a figure without a caption")
    return problems


def cells_are_short(chapter):
    """A cell fits on a screen, and half of them are shorter than a glance."""
    problems, lengths = [], []
    for cell in chapter.code:
        lines = cell.source.splitlines()
        if not notebooks.is_setup(cell):
            lengths.append(len(lines))
        if len(lines) > MAX_LINES:
            problems.append(f"{where(chapter, cell)} has {len(lines)} lines")
        wide = max(map(len, lines), default=0)
        if wide > MAX_COLUMNS:
            problems.append(f"{where(chapter, cell)} is {wide} columns wide")
    median = statistics.median(lengths) if lengths else 0
    if median > MAX_MEDIAN:
        problems.append(f"the median cell has {median:g} lines")
    return problems


def no_trailing_semicolon(chapter):
    """A trailing semicolon hides nothing under nbval."""
    return [
        f"{where(chapter, cell)} ends with a semicolon: use plt.show() or assign"
        for cell in chapter.code
        if cell.source.rstrip().endswith(";")
    ]


def kernel_is_python3(chapter):
    """Every machine has this kernel, and no other is asked for."""
    kernel = chapter.notebook.metadata.get("kernelspec", {}).get("name")
    return [] if kernel == "python3" else [f"the kernel is {kernel!r}, not 'python3'"]


def file_is_small(chapter):
    """A notebook opens at once, also where it is shown through a network."""
    size = chapter.file.stat().st_size
    return [] if size < MAX_BYTES else [f"{size / 1e6:.2f} MB; at most 1 MB"]


def can_fail(source: str) -> bool:
    """True if the code asserts something that depends on a name."""
    return any(
        isinstance(node, ast.Assert)
        and any(isinstance(part, ast.Name) for part in ast.walk(node.test))
        for node in ast.walk(ast.parse(source))
    )


def ignored_outputs_are_checked(chapter):
    """What nbval does not compare, the next code cell asserts."""
    problems = []
    for cell, after in zip(chapter.code, [*chapter.code[1:], None], strict=True):
        if "nbval-ignore-output" not in tags(cell):
            continue
        if after is None or not can_fail(after.source):
            problems.append(f"{where(chapter, cell)} is ignored, and nothing asserts")
    return problems


def no_cell_is_skipped(chapter):
    """nbval runs every cell, and none is allowed to raise."""
    return [
        f"{where(chapter, cell)} is tagged {tag}"
        for cell in chapter.code
        for tag in tags(cell)
        if tag in FORBIDDEN_TAGS
    ]


def headings_are_in_order(chapter):
    """One title, first; then no level is left out."""
    levels = [h for cell in chapter.markdown for h in headings(cell.source)]
    problems = []
    if [level for level, _ in levels].count(1) != 1 or levels[0][0] != 1:
        problems.append("there must be exactly one title (#), before all headings")
    for (above, _), (level, title) in zip(levels, levels[1:], strict=False):
        if level > above + 1:
            problems.append(f"{title!r} jumps from level {above} to {level}")
    return problems


def anchors(path: Path) -> set[str]:
    if path.suffix == ".ipynb":
        cells = notebooks.read_notebook(path).cells
        texts = [c.source for c in cells if c.cell_type == "markdown"]
    else:
        texts = [re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.DOTALL)]
    return {slug(title) for text in texts for _, title in headings(text)}


def local_links_resolve(chapter):
    """Links inside the course lead to a page, and to a heading that is there."""
    problems = []
    for cell in chapter.markdown:
        for token in tokens(cell.source):
            href = token.attrs.get("href", "") if token.type == "link_open" else ""
            if not href or re.match(r"[a-z]+:", href):
                continue
            name, _, anchor = href.partition("#")
            target = chapter.file.parent / name if name else chapter.file
            if not target.exists():
                problems.append(f"{where(chapter, cell)} links to {href}: no file")
            elif target.suffix == ".md" and target.with_suffix(".ipynb").exists():
                problems.append(f"{where(chapter, cell)} links to a twin: {href}")
            elif anchor and anchor not in anchors(target):
                problems.append(f"{where(chapter, cell)} links to {href}: no heading")
    return problems


def images_are_local(chapter):
    """No image is fetched from another host."""
    texts = [(cell, cell.source) for cell in chapter.markdown]
    texts += [(cell, t) for cell, out in outputs(chapter) for t in output_texts(out)]
    pattern = re.compile(
        r"!\[[^\]]*\]\(\s*<?(?:https?:)?//|src\s*=\s*['\"]?(?:https?:)?//"
    )
    return [
        f"{where(chapter, cell)} has an image of another host"
        for cell, text in texts
        if pattern.search(text)
    ]


def is_solution(cell) -> bool:
    hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
    return cell.cell_type == "code" and "hide-cell" in tags(cell) and hidden is True


def exercises_have_solutions(chapter):
    """`### Exercise N.k: title`, a stub, then a folded solution; numbered in order."""
    problems, sections = [], []
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            sections += [(title, []) for _, title in headings(cell.source)]
        elif sections:
            sections[-1][1].append(cell)
    exercises = [s for s in sections if s[0].startswith("Exercise ")]
    if chapter.is_numbered and not exercises:
        problems.append("there is no exercise (### Exercise N.k: title)")
    for number, (title, cells) in enumerate(exercises, 1):
        expected = f"Exercise {int(chapter.file.stem[:2])}.{number}: " if (
            chapter.is_numbered) else "Exercise "
        if not title.startswith(expected):
            problems.append(f"{title!r} should start with {expected!r}")
        stubs = [c for c in cells if not is_solution(c)]
        if not stubs or not any(map(is_solution, cells)):
            problems.append(f"{title!r} lacks a stub or a folded solution")
    return problems


def setup_cell_is_current(chapter):
    """The first code cell is the template's, and there is only one."""
    found = [c for c in chapter.code if notebooks.is_setup(c)]
    good = found == chapter.code[:1] and found[0].source == notebooks.setup_source()
    return [] if good else ["the setup cell is not the template's: run make sync"]


def length_is_a_chapter(chapter):
    """Long enough to explain, short enough to finish."""
    if not chapter.is_numbered:
        return []
    count = sum(len(re.findall(r"\b\w[\w'’-]*", c.source)) for c in chapter.markdown)
    low, high = WORDS
    return [] if low <= count <= high else [f"{count} words, not {low} to {high}"]


CHECKS = [
    twins_are_equal, counts_are_one_to_n, nothing_on_stderr, no_errors,
    markdown_is_plain, no_absolute_paths, no_object_addresses, figures_have_alt_text,
    figures_have_captions, cells_are_short, no_trailing_semicolon, kernel_is_python3,
    file_is_small, ignored_outputs_are_checked, no_cell_is_skipped,
    headings_are_in_order, local_links_resolve, images_are_local,
    exercises_have_solutions, setup_cell_is_current, length_is_a_chapter,
]  # fmt: skip
PAIRS = notebooks.twins()


def test_every_notebook_has_a_twin():
    alone = [p for pair in PAIRS for p in pair if not p.exists()]
    assert not alone, f"missing, run make sync: {[p.name for p in alone]}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].stem)
def test_notebook(pair, check):
    if not pair[1].exists():
        pytest.fail(f"{pair[1].name} is missing: run make sync and make execute")
    problems = check(Chapter(*pair))
    assert not problems, f"{check.__doc__}\n" + "\n".join(problems)


# ---- the checks can fail ---------------------------------------------------

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAA"
    "SUVORK5CYII="
)


def code(source, *, tag=None, outputs=(), **metadata):
    if tag:
        metadata["tags"] = tag.split()
    return nbformat.v4.new_code_cell(source, metadata=metadata, outputs=list(outputs))


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def stdout(value):
    return nbformat.v4.new_output("stream", name="stdout", text=value)


def good_notebook():
    figure = nbformat.v4.new_output(
        "display_data", {"image/png": PIXEL, "text/plain": "<Figure size 640x480>"}
    )
    cells = [
        text("# A chapter\n\n" + "A sentence of five words. " * 200),
        code("x = 1 / 3\nprint(x)", outputs=[stdout("0.3333333333333333\n")]),
        text("## Measure\n\n[Here](#measure), [there](02_next.ipynb#the-end), `{x}`."),
        code("y = clock()", tag="nbval-ignore-output", outputs=[stdout("17 ms\n")]),
        code("assert y > 0", tag="hide-cell"),
        code(
            "plt.show()",
            outputs=[figure],
            mystnb={"image": {"alt": "Time rises linearly with size"}},
        ),
        text("Time rises with size."),
        text("## Exercises\n\n### Exercise 1.1: go on\n\nDo it."),
        code("def f(x): ...  # your code"),
        code("def f(x): return x", tag="hide-cell", jupyter={"source_hidden": True}),
    ]
    return nbformat.v4.new_notebook(cells=cells)


def stored(notebook, folder: Path) -> Chapter:
    """The notebook synced, numbered and written, as make would."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = copy.deepcopy(notebook)
    notebooks.refresh_setup(notebook)
    for number, cell in enumerate(notebooks.code_cells(notebook), 1):
        cell.execution_count = number
    file = folder / "01_good.ipynb"
    notebooks.write_notebook(file, notebook)
    file.with_suffix(".md").write_text(notebooks.to_text(notebook))
    other = nbformat.v4.new_notebook(cells=[text("# Next\n\n## The end")])
    notebooks.write_notebook(folder / "02_next.ipynb", other)
    return Chapter(file.with_suffix(".md"), file)


@pytest.fixture
def good(tmp_path) -> Chapter:
    return stored(good_notebook(), tmp_path / "good")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_notebook_passes(good, check):
    assert check(good) == []


def add(*cells):
    """A break that appends cells (after the exercise's solution)."""
    return lambda notebook: notebook.cells.extend(copy.deepcopy(c) for c in cells)


def drop(number):
    return lambda notebook: notebook.cells.pop(number)


def put(number, source):
    def change(notebook):
        notebook.cells[number].source = source

    return change


def unlabel(number, key):
    return lambda notebook: notebook.cells[number].metadata.pop(key)


def shown(output):
    return add(code("z", outputs=[output]))


stderr = nbformat.v4.new_output("stream", name="stderr", text="UserWarning")
failure = nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
remote = nbformat.v4.new_output(
    "display_data", {"text/html": "<img src='https://example.org/a.png'>"}
)
BREAKS = {
    nothing_on_stderr: [shown(stderr)],
    no_errors: [shown(failure)],
    markdown_is_plain: [
        add(text("```{note}\nHello\n```")),
        add(text(":::{tip}\nHello\n:::")),
        add(text("See {ref}`there`.")),
        add(text("(label)=\n# Title")),
    ],
    no_absolute_paths: [
        add(code("open('/home/ann/x')")),
        add(text("It is in /tmp/scratch.")),
        shown(stdout("saved /root/.cache/x\n")),
        shown(stdout("C:\\Users\\ann\n")),
        shown(stdout(f"in {notebooks.ROOT}\n")),
    ],
    no_object_addresses: [shown(stdout("<Line2D object at 0x7f12ab34cd56>"))],
    figures_have_alt_text: [
        unlabel(5, "mystnb"),
        add(text("![](a.png)")),
        lambda nb: nb.cells[5].metadata.update(mystnb={"image": {"alt": "A figure"}}),
    ],
    figures_have_captions: [drop(6), put(6, "## Next"), put(6, "| a |\n|---|\n| 1 |")],
    cells_are_short: [
        add(code("\n".join(["x = 1"] * 31))),
        add(code("x = " + "1 + " * 19 + "10")),
        add(*[code("\n".join(["x = 1"] * 9))] * 8),
    ],
    no_trailing_semicolon: [add(code("plt.plot(x);"))],
    ignored_outputs_are_checked: [
        drop(4), put(4, "assert True"), put(4, "print(y)"),
        add(code("clock()", tag="nbval-ignore-output")),
    ],
    no_cell_is_skipped: [add(code("x", tag="nbval-skip"))],
    headings_are_in_order: [
        add(text("# Another title")), add(text("##### Too deep")), put(0, "No title."),
        put(0, "## Second level first " + "word " * 900),
    ],
    local_links_resolve: [
        add(text("[Gone](09_gone.ipynb)")), add(text("[Gone](#nowhere)")),
        add(text("[Twin](01_good.md)")), add(text("[Gone](02_next.ipynb#no-such)")),
    ],
    images_are_local: [
        add(text("![A big cat](https://example.org/a.png)")), shown(remote),
    ],
    exercises_have_solutions: [
        drop(9), drop(8), unlabel(9, "jupyter"), unlabel(9, "tags"),
        put(7, "## Exercises\n\n### Exercise 2.1: wrong\n\nDo it."),
        put(7, "## Exercises"),
    ],
    length_is_a_chapter: [put(0, "# A chapter"), add(text("word " * 3000))],
}  # fmt: skip
CASES = [(check, change) for check, changes in BREAKS.items() for change in changes]


@pytest.mark.parametrize(
    "check, change", CASES, ids=[f"{c.__name__}-{i}" for i, (c, _) in enumerate(CASES)]
)
def test_broken_notebook_is_found(tmp_path, check, change):
    notebook = good_notebook()
    change(notebook)
    assert check(stored(notebook, tmp_path / "broken")), "the check saw nothing"


# The rest is made right by the tools, so it is broken in the files.


def rewrite(chapter: Chapter, change) -> Chapter:
    notebook = notebooks.read_notebook(chapter.file)
    change(notebook)
    nbformat.write(notebook, chapter.file)
    return Chapter(chapter.text_file, chapter.file)


def test_unequal_twins_are_found(good):
    good.text_file.write_text(good.text_file.read_text().replace("five", "six", 1))
    assert twins_are_equal(good)


def test_a_tag_on_one_twin_is_found(good):
    changed = rewrite(good, lambda nb: nb.cells[2].metadata.update(tags=["hide-input"]))
    assert twins_are_equal(changed)


def test_a_missing_cell_is_found(good):
    assert twins_are_equal(rewrite(good, lambda nb: nb.cells.pop()))


def test_a_missing_twin_is_found(good):
    good.text_file.unlink()
    assert twins_are_equal(good)


@pytest.mark.parametrize("count", [None, 7])
def test_a_wrong_count_is_found(good, count):
    def change(notebook):
        notebook.cells[2].execution_count = count

    assert counts_are_one_to_n(rewrite(good, change))


def test_another_kernel_is_found(good):
    def change(notebook):
        notebook.metadata.kernelspec.name = "conda-env-x"

    assert kernel_is_python3(rewrite(good, change))


def test_a_big_file_is_found(good):
    big = stdout("x" * MAX_BYTES)
    assert file_is_small(rewrite(good, lambda nb: nb.cells[2].outputs.append(big)))


@pytest.mark.parametrize("change", [drop(1), put(1, "import opsbyte")])
def test_an_old_setup_cell_is_found(good, change):
    assert setup_cell_is_current(rewrite(good, change))


def test_each_check_is_broken_once():
    in_files = {
        twins_are_equal, counts_are_one_to_n, kernel_is_python3, file_is_small,
        setup_cell_is_current,
    }  # fmt: skip
    assert set(CHECKS) == set(BREAKS) | in_files
