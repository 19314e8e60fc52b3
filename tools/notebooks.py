"""The notebook pipeline: text twins, execution, and what is stale.

    python tools/notebooks.py sync                 carry edits between .md and .ipynb
    python tools/notebooks.py execute [NAME ...]   run what changed, or the named ones
    python tools/notebooks.py status               say what each notebook needs

Each chapter is a pair: `chapters/NAME.md` (MyST text: what people edit and review)
and `chapters/NAME.ipynb` (the same cells with their outputs: what the book shows).
Which side changed is decided by content, never by time stamps: the notebook's
metadata keeps the hash of the cells at the last sync and at the last execution.
"""
from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
LIBRARY = ROOT / "lib"
TEMPLATE = Path(__file__).with_name("setup_cell.py")

SETUP_TAG = "setup"
KEY = "opsbyte"  # the notebook metadata that this script owns
CELL_TIMEOUT = 120  # seconds
TEXT_FORMAT = "md:myst"
HEADER = """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "pygments_lexer": "ipython3", "file_extension": ".py"}
# Metadata that tools add while a notebook is open or running: not content.
TRANSIENT = {"execution", "collapsed", "scrolled", "ExecuteTime", "trusted", "id"}


class SyncConflict(Exception):
    """Both twins changed since they were last equal."""


# ---- content ---------------------------------------------------------------


def digest(value: object) -> str:
    """A short stable hash of anything that JSON can hold."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content(notebook) -> list[list]:
    """What the twins must agree on: type, source and metadata of each cell."""
    return [
        [
            cell.cell_type,
            cell.source.lstrip("\n").rstrip(),  # the text form drops these
            {k: v for k, v in cell.metadata.items() if k not in TRANSIENT},
        ]
        for cell in notebook.cells
    ]


def code_cells(notebook) -> list:
    """The cells that run: jupytext and nbclient leave empty ones out."""
    return [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]


def imported(source: str) -> set[str]:
    """Names of the opsbyte modules that a piece of code may import."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "opsbyte"}


def module_files(name: str) -> list[Path]:
    """Files that importing `name` runs: each package's __init__ and the module."""
    parts = name.split(".")
    files = []
    for depth in range(1, len(parts) + 1):
        base = LIBRARY.joinpath(*parts[:depth])
        files += [base / "__init__.py", base.with_suffix(".py")]
    return [file for file in files if file.is_file()]


def library_hash(source: str) -> str:
    """Hash of every library file that `source` imports, directly or not."""
    seen: dict[str, str] = {}
    waiting = [file for name in imported(source) for file in module_files(name)]
    while waiting:
        file = waiting.pop()
        key = file.relative_to(LIBRARY).as_posix()
        if key in seen:
            continue
        text = seen[key] = file.read_text()
        package = ".".join(file.relative_to(LIBRARY).parent.parts)
        names = imported(absolute_imports(text, package))
        waiting += [found for name in names for found in module_files(name)]
    data = sorted((LIBRARY / "opsbyte" / "data").glob("*")) if seen else []
    return digest([sorted(seen.items()), [f.read_text() for f in data if f.is_file()]])


def absolute_imports(text: str, package: str) -> str:
    """`text` with its relative imports made absolute."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1]
            node.module = ".".join(base + ([node.module] if node.module else []))
            node.level = 0
    return ast.unparse(tree)


def execution_hash(notebook) -> str:
    """Changes when the code of the notebook or of the library behind it does."""
    sources = [cell.source for cell in code_cells(notebook)]
    lines = "\n".join(sources).splitlines()
    plain = "\n".join("" if ln.lstrip()[:1] in ("%", "!") else ln for ln in lines)
    try:
        library = library_hash(plain)
    except SyntaxError:  # the run itself will say where
        library = ""
    return digest([sources, library])


# ---- files -----------------------------------------------------------------


def twins(folder: Path = CHAPTERS) -> list[tuple[Path, Path]]:
    """Every (text, notebook) pair in `folder`; one of the two may be missing.

    A Markdown file without jupytext's header is an ordinary page, not a twin.
    """
    names = {p.stem for p in folder.glob("*.ipynb")}
    for path in folder.glob("*.md"):
        if path.read_text().lstrip().startswith("---\njupytext:"):
            names.add(path.stem)
    return [(folder / f"{n}.md", folder / f"{n}.ipynb") for n in sorted(names)]


def read_text(path: Path):
    try:
        return jupytext.reads(path.read_text(), fmt=TEXT_FORMAT)
    except jupytext.myst.MystMetadataParsingError as error:
        raise SystemExit(f"{path.name}: {error}") from None


def to_text(notebook) -> str:
    """The notebook's cells as MyST text, under the course's fixed header."""
    bare = nbformat.v4.new_notebook(
        cells=[
            nbformat.from_dict(
                {**cell, "metadata": {k: v for k, v in cell.metadata.items()
                                      if k not in TRANSIENT}}
            )
            for cell in notebook.cells
        ],
        metadata={"kernelspec": dict(KERNELSPEC), "language_info": dict(LANGUAGE)},
    )
    text = jupytext.writes(bare, fmt=TEXT_FORMAT)
    body = re.sub(r"\A---\n.*?\n---\n", "", text, count=1, flags=re.DOTALL)
    return HEADER + body


def read_notebook(path: Path):
    return nbformat.read(path, as_version=4)


def write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def write_notebook(path: Path, notebook) -> None:
    notebook.metadata = nbformat.from_dict({
        "kernelspec": dict(KERNELSPEC),
        "language_info": dict(LANGUAGE),
        KEY: dict(sorted(notebook.metadata.get(KEY, {}).items())),
    })
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    name_cells(notebook)
    nbformat.validate(notebook)
    write(path, nbformat.writes(notebook) + "\n")


def name_cells(notebook) -> None:
    """Stable cell ids, from the content: a rewrite gives the same file."""
    used: set[str] = set()
    for cell in notebook.cells:
        base = digest([cell.cell_type, cell.source])[:8]
        name, count = base, 1
        while name in used:
            count += 1
            name = f"{base}-{count}"
        used.add(name)
        cell["id"] = name


# ---- the setup cell --------------------------------------------------------


def repository_url(root: Path = ROOT) -> str:
    """The one setting: `repository: url:` in _config.yml; empty by default."""
    config = yaml.safe_load((root / "_config.yml").read_text())
    url = (config.get("repository") or {}).get("url") or ""
    return url.rstrip("/")


def setup_source() -> str:
    template = TEMPLATE.read_text().rstrip("\n")
    return template.replace("{repository}", repository_url())


def is_setup(cell) -> bool:
    return cell.cell_type == "code" and SETUP_TAG in cell.metadata.get("tags", [])


def refresh_setup(notebook) -> None:
    """Make the first code cell the setup cell, as the template has it now."""
    source = setup_source()
    kinds = [cell.cell_type for cell in notebook.cells]
    first = kinds.index("code") if "code" in kinds else None
    if first is None:
        return
    if is_setup(notebook.cells[first]):
        cell = notebook.cells[first]
    else:
        notebook.cells = [cell for cell in notebook.cells if not is_setup(cell)]
        cell = nbformat.v4.new_code_cell()
        notebook.cells.insert(first, cell)
    cell.source = source
    cell.metadata = nbformat.from_dict({"tags": [SETUP_TAG, "hide-cell"]})


# ---- sync ------------------------------------------------------------------


def keep_outputs(new, old) -> None:
    """Give each code cell of `new` the outputs of the same cell in `old`."""
    stock: dict[str, list] = {}
    for cell in code_cells(old):
        stock.setdefault(cell.source, []).append(cell)
    for cell in code_cells(new):
        if stock.get(cell.source):
            match = stock[cell.source].pop(0)
            cell.outputs, cell.execution_count = match.outputs, match.execution_count


def sync(text: Path, book: Path, prefer: str | None = None) -> str:
    """Make the twins equal; returns what was done.

    The notebook's metadata holds the hash of the content at the last sync; the side
    that no longer has it is the one that was edited.

    Raises:
        SyncConflict: both were edited, and `prefer` ("md" or "ipynb") is not given.
    """
    notebook = read_notebook(book) if book.exists() else None
    source = read_text(text) if text.exists() else None
    side = edited_side(source, notebook, text.name, prefer)
    newest = source if side == "md" else notebook
    before = content(newest)
    refresh_setup(newest)
    if side == "md" and notebook is not None:
        keep_outputs(newest, notebook)
        newest.metadata[KEY] = notebook.metadata.get(KEY, {})
    synced = digest(content(newest))
    stale = newest.metadata.get(KEY, {}).get("synced") != synced
    newest.metadata[KEY] = {**newest.metadata.get(KEY, {}), "synced": synced}
    changed = []
    fresh = to_text(newest)
    if not text.exists() or text.read_text() != fresh:
        write(text, fresh)
        changed.append(text.name)
    if stale or notebook is None or content(newest) != before or side == "md":
        previous = book.read_text() if book.exists() else None
        write_notebook(book, newest)
        if book.read_text() != previous:
            changed.append(book.name)
    return "wrote " + " and ".join(changed) if changed else "in step"


def edited_side(source, notebook, name: str, prefer: str | None) -> str:
    """Which twin is the newer one by content: "md" or "ipynb"."""
    if notebook is None:
        return "md"
    if source is None:
        return "ipynb"
    ours, theirs = digest(content(source)), digest(content(notebook))
    synced = notebook.metadata.get(KEY, {}).get("synced")
    if ours == theirs or theirs == synced:
        return "md"
    if ours == synced:
        return "ipynb"
    if prefer in ("md", "ipynb"):
        return prefer
    raise SyncConflict(
        f"{name} and its notebook both changed since they were last equal. Keep one"
        " with --prefer md or --prefer ipynb; the other's edits are lost."
    )


# ---- execution -------------------------------------------------------------


def execute(book: Path) -> None:
    """Run a notebook from a clean start and store its outputs.

    Raises what nbclient raises when a cell fails; the file is then left as it was.
    """
    notebook = read_notebook(book)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # what it says is not output
        resources={"metadata": {"path": str(book.parent)}},
    )
    client.execute()
    for count, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = count
        cell.outputs = merge_streams(cell.outputs)
        for output in cell.outputs:
            tidy_output(output, count)
    entry = notebook.metadata.get(KEY, {})
    notebook.metadata[KEY] = {**entry, "executed": execution_hash(notebook)}
    write_notebook(book, notebook)


def merge_streams(outputs: list) -> list:
    """What one cell prints arrives in pieces, cut by chance; join neighbours."""
    merged: list = []
    for output in outputs:
        last = merged[-1] if merged else None
        if output.output_type == "stream" and last is not None and (
            last.output_type == "stream" and last.name == output.name
        ):
            last.text += output.text
        else:
            merged.append(output)
    return merged


def tidy_output(output, count: int) -> None:
    """Number the output and take this machine's paths out of its text."""
    if output.output_type == "execute_result":
        output.execution_count = count
    output.get("metadata", {}).pop("execution", None)
    if output.output_type == "stream":
        output.text = hide_paths(output.text)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") and isinstance(value, str):
            output.data[kind] = hide_paths(value)


def hide_paths(text: str) -> str:
    for path, name in ((str(ROOT), "…"), (str(Path.home()), "~")):
        if len(path) > 1:
            text = re.sub(re.escape(path) + r"(?=[/\\\s'\":]|$)", name, text)
    return text


def is_executed(notebook) -> bool:
    return notebook.metadata.get(KEY, {}).get("executed") == execution_hash(notebook)


# ---- command line ----------------------------------------------------------


def chosen(names: list[str]) -> list[tuple[Path, Path]]:
    """The pairs whose name starts with one of `names`; all without names."""
    pairs = twins()
    if not names:
        return pairs
    stems = [Path(name).stem for name in names]
    picked = [p for p in pairs if any(p[0].stem.startswith(s) for s in stems)]
    for stem in stems:
        if not any(pair[0].stem.startswith(stem) for pair in pairs):
            have = ", ".join(pair[0].stem for pair in pairs) or "none"
            raise SystemExit(f"no chapter's name starts with {stem!r}; have: {have}")
    return picked


def run_sync(names: list[str], prefer: str | None) -> bool:
    good = True
    for text, book in chosen(names):
        try:
            done = sync(text, book, prefer)
        except SyncConflict as problem:
            print(f"conflict   {problem}", file=sys.stderr)
            good = False
        else:
            if done != "in step":
                print(f"{text.stem}: {done}")
    return good


def run_execute(names: list[str], everything: bool) -> bool:
    pairs = [
        (text, book)
        for text, book in chosen(names)
        if names or everything or not is_executed(read_notebook(book))
    ]
    if not pairs:
        print("nothing to run: every notebook's code and library are unchanged")
    failed = []
    for number, (_, book) in enumerate(pairs, 1):
        print(f"[{number}/{len(pairs)}] {book.stem} ...", end=" ", flush=True)
        start = time.perf_counter()
        try:
            execute(book)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as problem:
            print(f"FAILED after {time.perf_counter() - start:.1f} s\n{problem}")
            failed.append(book.stem)
        else:
            size = book.stat().st_size / 1e3
            print(f"{time.perf_counter() - start:.1f} s, {size:.0f} kB", flush=True)
    if failed:
        print("failed, their files left as they were:", ", ".join(failed))
    return not failed


def run_status(names: list[str]) -> bool:
    for text, book in chosen(names):
        if not (text.exists() and book.exists()):
            state = "needs sync"
        else:
            notebook = read_notebook(book)
            equal = content(read_text(text)) == content(notebook)
            state = "needs sync" if not equal else (
                "up to date" if is_executed(notebook) else "needs execute"
            )
        print(f"{state:14} {text.stem}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("sync", help="carry edits between .md and .ipynb")
    sub.add_argument("names", nargs="*", help="starts of chapter names; default all")
    sub.add_argument("--prefer", choices=("md", "ipynb"), help="in a conflict, keep")
    sub = commands.add_parser("execute", help="sync, then run what changed")
    sub.add_argument("names", nargs="*", help="run these, changed or not")
    sub.add_argument("--all", action="store_true", help="run all, changed or not")
    sub = commands.add_parser("status", help="say what each notebook needs")
    sub.add_argument("names", nargs="*")
    args = parser.parse_args()
    if sys.platform == "win32":  # pyzmq needs a selector loop
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    if args.command == "sync":
        good = run_sync(args.names, args.prefer)
    elif args.command == "execute":
        good = run_sync(args.names, None) and run_execute(args.names, args.all)
    else:
        good = run_status(args.names)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
