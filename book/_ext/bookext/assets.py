"""Everything a page loads comes from the site itself, once, and only where it is needed.

MathJax is copied from the package ``sphinx-mathjax-offline``; scripts that stock pages load twice,
or load for a service this book does not use, are dropped. The site then makes no external request
and leaves no console message, over http and opened from disk.
"""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

#: What pages need of MathJax: the combined component, fonts, extensions on demand, speech.
MATHJAX_PARTS = ("tex-mml-chtml.js", "output/chtml/fonts", "input/tex/extensions", "sre", "a11y")

#: Marks of scripts and styles that belong to live kernels, which the book does not offer.
UNUSED = ("thebe",)

#: Files that tell the console which theme is on, how many buttons they found, what was sought.
CHATTY = (
    "_static/scripts/pydata-sphinx-theme.js",
    "_static/searchtools.js",
    "_static/togglebutton.js",
    "search.html",
)

#: Calls that only inform; warnings and errors are left alone.
NOTICE = re.compile(r"\bconsole\.(?:log|info|debug)\((?!\))")


def copy_mathjax(app: Sphinx) -> None:
    """Copy MathJax into ``_static/vendor/mathjax`` before the pages are written."""
    if app.builder.format != "html":
        return
    package = importlib.util.find_spec("sphinx-mathjax-offline")
    if package is None or package.origin is None:
        raise ExtensionError("MathJax is missing: pip install sphinx-mathjax-offline")
    origin = Path(package.origin).parent / "static" / "mathjax"
    target = Path(app.outdir) / "_static" / "vendor" / "mathjax"
    for part in MATHJAX_PARTS:
        source, copy = origin / part, target / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, copy)


def silence_notices(app: Sphinx, error: Exception | None) -> None:
    """Take the chatter out of the theme's scripts, so that a console message is a fault."""
    if error is not None or app.builder.format != "html":
        return
    for name in CHATTY:
        script = Path(app.outdir) / name
        script.write_text(NOTICE.sub("void (", script.read_text("utf8")), "utf8")


def _is_unused(asset: Any) -> bool:
    text = f"{getattr(asset, 'filename', asset)} {getattr(asset, 'attributes', '')}".lower()
    return any(mark in text for mark in UNUSED)


def _identity(asset: Any) -> tuple:
    attributes = getattr(asset, "attributes", None) or {}
    # The name of an inline script is None or empty, depending on who registered it.
    return str(getattr(asset, "filename", asset) or ""), str(attributes.get("body"))


def keep_needed_assets(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Drop unused scripts and styles from a page, and every second copy of the others."""
    for kind in ("script_files", "css_files"):
        kept: dict[tuple, Any] = {}
        for asset in context.get(kind, []):
            if not _is_unused(asset):
                kept.setdefault(_identity(asset), asset)
        # In place: the theme and the search page hold on to the same list.
        context[kind][:] = kept.values()


def drop_kernel_configuration(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Remove the invisible block that stock pages carry for live kernels."""
    for node in list(doctree.findall(nodes.raw)):
        if "text/x-thebe-config" in node.astext():
            node.parent.remove(node)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", copy_mathjax)
    app.connect("doctree-resolved", drop_kernel_configuration, priority=900)
    app.connect("html-page-context", keep_needed_assets, priority=900)
    app.connect("build-finished", silence_notices)
