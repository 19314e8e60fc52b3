"""The book's Sphinx extension: folded cells, mathematics, hosting.

* Folded cells say what is in them: the setup, a solution, a check.
* A number and its per cent sign stay on one line.
* Formulas are typeset by the copy of KaTeX in `_ext/katex`, loaded only by pages that
  have formulas, so that no page asks another host for anything.
* Buttons that open a notebook on Binder or Colab, and those that lead to the
  repository, appear when `repository: url:` in `_config.yml` names one.
* The 404 page, the sitemap and social cards need to know where the book is hosted.
  They take it from `html: baseurl:` in `_config.yml`; without one, the 404 page assumes
  the root of a host, and the other two are left out.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes

KATEX = Path(__file__).parent / "katex"
FILES = ("katex.min.css", "katex.min.js", "render.js")
CLASSES = "math tex notranslate nohighlight"


def label(cell) -> str:
    """What the bar of a folded cell calls it."""
    tags = cell["metadata"].get("tags", [])
    source = "".join(cell["source"])
    if "setup" in tags:
        return "the setup"
    if re.match("# What the check compares with", source):
        return "the check"
    if cell["metadata"].get("jupyter", {}).get("source_hidden"):
        return "the solution"
    hidden = "hide-cell" in tags
    check = r"^( *assert |_ = check\()" if hidden else r"^(assert |_ = check\()"
    if re.search(check, source, re.MULTILINE):
        return "the check"
    return "the cell" if hidden else "the code"


def name_folded_cells(app, docname, source) -> None:
    """Give each folded cell of a notebook its own prompt."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if {"hide-cell", "hide-input"} & set(cell["metadata"].get("tags", [])):
            settings = cell["metadata"].setdefault("mystnb", {})
            settings["code_prompt_show"] = f"Show {label(cell)}"
            settings["code_prompt_hide"] = f"Hide {label(cell)}"
    source[0] = json.dumps(notebook)


def name_them_aloud(app, pagename, templatename, context, doctree) -> None:
    """Let a screen reader say a folded cell's own prompt, not one for all."""
    if "body" in context:
        same = ' aria-label="Toggle hidden content"'
        context["body"] = context["body"].replace(same, "")


def keep_together(app, doctree) -> None:
    """Keep a number and its per cent sign on one line."""
    code = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw)
    for text in list(doctree.findall(nodes.Text)):
        joined = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)
        if joined != text and not isinstance(text.parent, code):
            text.parent.replace(text, nodes.Text(joined))


def visit_math(translator, node) -> None:
    tag = translator.starttag(node, "span", "", CLASS=CLASSES)
    translator.body.append(f"{tag}{translator.encode(node.astext())}</span>")
    raise nodes.SkipNode


def visit_displaymath(translator, node) -> None:
    tag = translator.starttag(node, "div", "", CLASS=CLASSES)
    translator.body.append(f"{tag}{translator.encode(node.astext().strip())}</div>\n")
    raise nodes.SkipNode


def load_katex(app, pagename, templatename, context, doctree) -> None:
    """Add KaTeX to a page that has formulas."""
    formulas = (nodes.math, nodes.math_block)
    if doctree is None or not any(map(list, map(doctree.findall, formulas))):
        return
    app.add_css_file("katex/katex.min.css")
    app.add_js_file("katex/katex.min.js", loading_method="defer")
    app.add_js_file("katex/render.js", loading_method="defer")


def copy_katex(app, exception) -> None:
    """Copy the files themselves; Jupyter Book would load all of _static everywhere."""
    if exception or app.builder.format != "html":
        return
    target = Path(app.outdir) / "_static" / "katex"
    for source in [*(KATEX / name for name in FILES), *KATEX.glob("fonts/*.woff2")]:
        file = target / source.relative_to(KATEX)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())


def use_repository(app, config) -> None:
    """Show the buttons that need a public repository where there is one."""
    options = config.html_theme_options
    if not options.get("repository_url"):
        return
    options["launch_buttons"] = {
        "notebook_interface": "jupyterlab",
        "binderhub_url": "https://mybinder.org",
        "colab_url": "https://colab.research.google.com",
    }
    for button in ("repository", "issues", "edit_page"):
        options[f"use_{button}_button"] = True


def use_base_url(app, config) -> None:
    """Pass the place where the book is hosted on to the pages that need it."""
    path = urlsplit(config.html_baseurl or "").path.rstrip("/")
    config.notfound_urls_prefix = f"{path}/"
    config.notfound_context = {
        "title": "Page not found",
        "body": "<h1>Page not found</h1><p>There is no page at this address. Search the"
        f' course, or start at <a href="{path}/index.html">its first page</a>.</p>',
    }
    if not config.html_baseurl:
        return
    app.setup_extension("sphinx_sitemap")
    config.sitemap_url_scheme = "{link}"
    config.sitemap_excludes = ["404.html", "search.html"]
    app.setup_extension("sphinxext.opengraph")
    config.ogp_site_url = config.html_baseurl
    config.ogp_site_name = config.html_title
    picture = "_static/social.png"
    cards = {"image": picture, "image_mini": picture, "line_color": "#e69f00"}
    config.ogp_social_cards = cards


def setup(app):
    app.add_html_math_renderer(
        "katex", (visit_math, None), (visit_displaymath, None)
    )
    app.add_config_value("comments_config", {}, "")  # set by Jupyter Book, not used
    app.setup_extension("notfound.extension")
    app.connect("config-inited", use_repository, priority=1)
    app.connect("config-inited", use_base_url, priority=1)
    app.connect("source-read", name_folded_cells)
    app.connect("doctree-read", keep_together)
    app.connect("html-page-context", name_them_aloud)
    app.connect("html-page-context", load_katex)
    app.connect("build-finished", copy_katex)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
