"""The built book: clean, whole, and asking no other host for anything.

The book is built once, from nothing, with warnings as errors. Each check is a function
that returns its problems, and is shown to find what it is for on pages broken for it.
"""
from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import notebooks
import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = notebooks.ROOT
REMOTE = re.compile(r"^\s*(?:https?:|wss?:)?//", re.IGNORECASE)
# Attributes that make a browser fetch something while it loads a page.
FETCHED = {
    "script": ["src"], "img": ["src", "srcset"], "iframe": ["src"], "source": ["src"],
    "video": ["src", "poster"], "audio": ["src"], "embed": ["src"], "object": ["data"],
    "track": ["src"], "input": ["src"], "use": ["href", "xlink:href"],
    "image": ["href", "xlink:href"],
}  # fmt: skip
PLACE = "https://someone.example.org/course/"
IDLE_LINKS = {"canonical", "next", "prev", "search", "index", "author", "license"}


def build(target: Path, *options) -> Path:
    """Build the book from nothing into `target`, with warnings as errors."""
    tool = Path(sys.executable).with_name("jupyter-book")
    strict = ["-W", "-n", "--keep-going", "--all", *options]
    command = [tool, "build", *strict, "--path-output", target, ROOT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return target / "_build" / "html"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return build(tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    """The book as it is with a public repository and a public address."""
    target = tmp_path_factory.mktemp("hosted")
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    settings["repository"]["url"] = "https://github.com/someone/course"
    settings["html"]["baseurl"] = PLACE
    settings["sphinx"]["local_extensions"]["course"] = str(ROOT / "_ext")
    config = target / "_config.yml"
    config.write_text(yaml.safe_dump(settings))
    return build(target, "--config", config)


@cache
def parse(file: Path) -> BeautifulSoup:
    return BeautifulSoup(file.read_text(), "html.parser")


def pages(folder: Path) -> list[Path]:
    """Every page that a reader can meet (not the theme's templates)."""
    return sorted(p for p in folder.rglob("*.html") if "_static" not in p.parts)


@cache
def anchors(file: Path) -> set[str]:
    soup = parse(file)
    named = {tag["name"] for tag in soup.find_all("a", attrs={"name": True})}
    return named | {tag["id"] for tag in soup.find_all(id=True)}


def targets(page: Path):
    """(attribute's value, what it is) for every link and image of a page."""
    for tag in parse(page).find_all(True):
        for name in ("href", "src", "data"):
            if tag.get(name) is not None:
                yield tag[name], tag


def is_redirect(page: Path) -> bool:
    return parse(page).find("meta", attrs={"http-equiv": "Refresh"}) is not None


# ---- the checks ------------------------------------------------------------


def dead_links(folder: Path, prefix: str = "") -> list[str]:
    """Internal links, anchors, images, styles and scripts that lead nowhere.

    The 404 page is served for any address, so its links start at the root of the host,
    or at `prefix` below it.
    """
    problems = []
    for page in pages(folder):
        for value, tag in targets(page):
            parts = urlsplit(value)
            if parts.scheme or parts.netloc or value in ("", "#"):
                continue
            path = unquote(parts.path)
            if path.startswith(f"{prefix}/") and page.name == "404.html":
                file = folder / path.removeprefix(f"{prefix}/")
            else:
                file = (page.parent / path).resolve() if path else page
            if file.is_dir():
                file = file / "index.html"
            if not file.is_file():
                problems.append(f"{page.name}: <{tag.name}> {value}: no such file")
            elif (
                parts.fragment and tag.name == "a" and file.suffix == ".html"
                and unquote(parts.fragment) not in anchors(file)
            ):  # fmt: skip
                problems.append(f"{page.name}: {value}: no such anchor")
    return problems


def remote_requests(folder: Path) -> list[str]:
    """What a browser would fetch from another host while loading a page."""
    problems = []
    for page in pages(folder):
        soup = parse(page)
        for tag in soup.find_all(True):
            names = FETCHED.get(tag.name, [])
            if tag.name == "link" and not IDLE_LINKS & set(tag.get("rel", [])):
                names = ["href"]
            for name in names:
                if any(map(REMOTE.match, (tag.get(name) or "").split(","))):
                    problems.append(f"{page.name}: <{tag.name}> {tag[name]}")
            problems += [f"{page.name}: {u}" for u in style_urls(tag.get("style", ""))]
        for style in soup.find_all("style"):
            problems += [f"{page.name}: {url}" for url in style_urls(style.text)]
        for script in soup.find_all("script", src=False):
            problems += [f"{page.name}: {u}" for u in script_urls(script.text)]
    for file in folder.rglob("*.css"):
        problems += [f"{file.name}: {url}" for url in style_urls(file.read_text())]
    return problems


def style_urls(css: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", css)
    return [a or b for a, b in found if REMOTE.match(a or b)]


def script_urls(script: str) -> list[str]:
    """Addresses that an inline script may fetch: all but those that it only shows."""
    return re.findall(r"['\"`]((?:https?:)?//[\w.-]+\.[a-z]{2,}[^'\"`]*)", script)


def dead_styles(folder: Path) -> list[str]:
    """Fonts and images of stylesheets that are not there."""
    problems = []
    for file in folder.rglob("*.css"):
        for url in re.findall(r"url\(\s*['\"]?([^'\")]+)", file.read_text()):
            if url.startswith(("data:", "#")) or REMOTE.match(url):
                continue
            if not (file.parent / unquote(urlsplit(url).path)).is_file():
                problems.append(f"{file.name}: {url}")
    return problems


def poor_pages(folder: Path) -> list[str]:
    """Pages without a title, a language or a heading; images without alt text."""
    problems = []
    for page in pages(folder):
        if is_redirect(page):
            continue
        soup = parse(page)
        title = soup.title.text.strip() if soup.title else ""
        if not title or title.startswith("<no title>"):
            problems.append(f"{page.name}: no title")
        if not soup.html.get("lang"):
            problems.append(f"{page.name}: no language")
        shown = [h for h in soup("h1") if not h.find_parent(id="jb-print-docs-body")]
        if len(shown) != 1:
            problems.append(f"{page.name}: {len(shown)} first headings")
        for image in soup.find_all("img"):
            if not image.get("alt", "").strip() and image.get("role") != "presentation":
                problems.append(f"{page.name}: no alt text: {image.get('src')}")
    return problems


def hosting_links(folder: Path) -> list[str]:
    """Links that need a public repository."""
    found = (tag.get("href", "") for page in pages(folder) for tag in parse(page)("a"))
    return [link for link in found if re.search("colab|binder|someone/course", link)]


CHECKS = [dead_links, remote_requests, dead_styles, poor_pages]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_book(book, check):
    problems = check(book)
    assert not problems, f"{check.__doc__}\n" + "\n".join(problems[:40])


@pytest.mark.slow
def test_every_chapter_is_a_page(book):
    files = [p for p in notebooks.CHAPTERS.iterdir() if p.suffix in (".ipynb", ".md")]
    missing = {p.stem for p in files} - {p.stem for p in pages(book)}
    assert not missing, f"not in _toc.yml: {sorted(missing)}"


@pytest.mark.slow
def test_figures_carry_the_alt_text_of_their_cell(book):
    for _, file in notebooks.twins():
        page = book / "chapters" / f"{file.stem}.html"
        shown = {image.get("alt") for image in parse(page)("img")}
        for cell in notebooks.read_notebook(file).cells:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
            assert alt is None or alt in shown, f"{file.name}: {alt!r} is missing"


@pytest.mark.slow
def test_mathematics_is_typeset_by_the_local_copy(book):
    for page in pages(book):
        sources = [s.get("src", "") for s in parse(page)("script")]
        loaded = any("katex.min.js" in source for source in sources)
        formulas = parse(page).select(".math.tex")
        assert loaded == bool(formulas), page.name
        assert not any("mathjax" in source.lower() for source in sources), page.name


@pytest.mark.slow
def test_numbers_keep_their_per_cent_sign(book):
    paragraphs = [p for page in pages(book) for p in parse(page).select("article p")]
    text = "".join(s for p in paragraphs for s in p.strings if s.parent.name != "span")
    assert len(re.findall(r"\d\N{NO-BREAK SPACE}%", text)) > 20
    assert not re.search(r"\d %", text)


@pytest.mark.slow
def test_without_a_public_place_nothing_points_to_one(book):
    if not notebooks.repository_url():
        assert hosting_links(book) == []
        assert not (book / "sitemap.xml").exists()


@pytest.mark.slow
def test_with_a_public_place_launch_buttons_sitemap_and_cards_appear(hosted):
    links = hosting_links(hosted)
    sitemap = (hosted / "sitemap.xml").read_text()
    for _, file in notebooks.twins():
        launch = f"/github/someone/course/blob/main/chapters/{file.name}"
        assert any(link.endswith(launch) for link in links), file.name
        assert f"{PLACE}chapters/{file.stem}.html" in sitemap
        soup = parse(hosted / "chapters" / f"{file.stem}.html")
        card = soup.find("meta", property="og:image")["content"]
        path = card.removeprefix(PLACE)
        assert (hosted / path).is_file()
    assert links and "404.html" not in sitemap
    assert dead_links(hosted, prefix="/course") == []
    assert remote_requests(hosted) == []


# ---- the checks can fail ---------------------------------------------------

GOOD = """<!DOCTYPE html><html lang="en"><head><title>A</title>
<link rel="stylesheet" href="a.css"><link rel="canonical" href="https://example.org/">
<script src="a.js"></script></head><body><h1 id="top">A</h1>
<a href="#top">up</a> <a href="b.html#end">b</a> <a href="https://example.org">out</a>
<img src="a.png" alt="A figure"></body></html>"""
OTHER = '<!DOCTYPE html><html lang="en"><title>B</title><h1 id="end">B</h1></html>'


@pytest.fixture
def site(tmp_path):
    files = {"a.html": GOOD, "b.html": OTHER, "a.js": "", "a.png": "", "b.woff2": ""}
    files["a.css"] = "@font-face { src: url(b.woff2) } a { background: url(data:x) }"
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_good_site_passes(site, check):
    assert check(site) == []


@pytest.mark.parametrize("check, file, old, new", [
    (dead_links, "a.html", "b.html#end", "c.html"),
    (dead_links, "a.html", "b.html#end", "b.html#no"),
    (dead_links, "a.html", '"#top"', '"#no"'),
    (dead_links, "a.html", "a.png", "c.png"),
    (dead_links, "a.html", "a.css", "c.css"),
    (dead_links, "a.html", "a.js", "c.js"),
    (remote_requests, "a.html", "a.js", "https://example.org/a.js"),
    (remote_requests, "a.html", "a.png", "//example.org/a.png"),
    (remote_requests, "a.html", "a.css", "http://example.org/a.css"),
    (remote_requests, "a.html", "</h1>", "</h1><iframe src='https://example.org'>"),
    (remote_requests, "a.html", "</h1>", "</h1><p style='--x: url(//example.org/x)'>"),
    (remote_requests, "a.html", "</h1>", "</h1><style>@import '//ex.org/x'</style>"),
    (remote_requests, "a.html", "</h1>", "</h1><script>f('https://ex.org')</script>"),
    (remote_requests, "a.html", 'rel="canonical"', 'rel="preconnect"'),
    (remote_requests, "a.css", "b.woff2", "https://example.org/b.woff2"),
    (dead_styles, "a.css", "b.woff2", "c.woff2"),
    (poor_pages, "a.html", "<title>A</title>", ""),
    (poor_pages, "a.html", ' lang="en"', ""),
    (poor_pages, "a.html", "h1", "h2"),
    (poor_pages, "a.html", "A figure", ""),
])  # fmt: skip
def test_a_broken_site_is_found(site, check, file, old, new):
    text = (site / file).read_text()
    assert old in text
    (site / file).write_text(text.replace(old, new))
    assert check(site), "the check saw nothing"
