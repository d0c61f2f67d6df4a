"""Claims of the book: collected from the executed pages, held to the rule, drawn and listed.

The check records sit in the outputs of the executed cells; MyST-NB carries them into the document
tree (``attention_dynamics.verification.myst``). Breaches of the rule are warnings, so that a build
with ``-W`` is red.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from .claim_map import draw
from .ledger_page import write
from .rule import breaches
from .statements import Page, claims_of, read_page

logger = logging.getLogger(__name__)


class claims_view(nodes.General, nodes.Element):
    """Where the map or the ledger will stand; ``view`` says which."""


class ClaimMap(SphinxDirective):
    """``{claim-map}``: the graph of everything the book states."""

    view = "map"

    def run(self) -> list[nodes.Node]:
        """A placeholder: the map is drawn when all pages have been read."""
        views(self.env).setdefault(self.env.docname, []).append(self.view)
        return [claims_view(view=self.view)]


class Ledger(ClaimMap):
    """``{ledger}``: every check that ran, counted and listed by page."""

    view = "ledger"


def pages(env: BuildEnvironment) -> dict[str, Page]:
    """``{docname: Page}``, kept in the environment."""
    if not hasattr(env, "book_pages"):
        env.book_pages = {}  # type: ignore[attr-defined]
    return env.book_pages  # type: ignore[attr-defined]


def views(env: BuildEnvironment) -> dict[str, list[str]]:
    """``{docname: ["map", ...]}``: the pages that show the whole book."""
    if not hasattr(env, "book_views"):
        env.book_views = {}  # type: ignore[attr-defined]
    return env.book_views  # type: ignore[attr-defined]


def reading_order(env: BuildEnvironment) -> list[Page]:
    """The pages as the table of contents orders them, those outside it last."""
    order: list[str] = []

    def walk(doc: str) -> None:
        if doc not in order:
            order.append(doc)
            for child in env.toctree_includes.get(doc, []):
                walk(child)

    walk(env.config.root_doc)
    known = pages(env)
    return [known[doc] for doc in [*order, *sorted(set(known) - set(order))] if doc in known]


def collect(app: Sphinx, tree: nodes.document) -> None:
    """Read one page's statements and records."""
    doc = app.env.docname
    heading = next(iter(tree.findall(nodes.title)), None)
    page = read_page(doc, heading.astext() if heading is not None else doc, tree)
    if page.statements or page.records or page.unlabelled:
        pages(app.env)[doc] = page


def forget(app: Sphinx, env: BuildEnvironment, doc: str) -> None:
    """A page is read again, or gone."""
    pages(env).pop(doc, None)
    views(env).pop(doc, None)


def merge(app: Sphinx, env: BuildEnvironment, docs: Any, other: BuildEnvironment) -> None:
    """Take over what a parallel reader found."""
    for doc in docs:
        for mine, theirs in ((pages(env), pages(other)), (views(env), views(other))):
            if doc in theirs:
                mine[doc] = theirs[doc]


def hold_to_the_rule(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of every breach."""
    for breach in breaches(reading_order(env)):
        location = (breach.doc, breach.line) if breach.line else breach.doc
        logger.warning("%s", breach.message, location=location, type="claims")


def refresh(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Pages with a map or a ledger are written anew whenever any page changed."""
    for doc, shown in views(env).items():
        if "ledger" in shown:
            # The ledger's formulas come after reading; MathJax has to be loaded for them.
            env.get_domain("math").data["has_equations"][doc] = True
    return list(views(env))


def fill(app: Sphinx, tree: nodes.document, doc: str) -> None:
    """Put the map or the ledger in its place."""
    for node in list(tree.findall(claims_view)):
        if app.builder.format != "html":
            text = "The map and the ledger of claims are part of the HTML book."
            node.replace_self(nodes.paragraph("", text))
            continue

        def link(target: str, anchor: str) -> str:
            return f"{app.builder.get_relative_uri(doc, target)}#{anchor}"

        order = reading_order(app.env)
        render = draw if node["view"] == "map" else write
        node.replace_self(nodes.raw("", render(order, claims_of(order), link), format="html"))


def serve_stylesheet(app: Sphinx) -> None:
    """Add the extension's own stylesheet to the site."""
    app.config.html_static_path.append(str(Path(__file__).parent / "static"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the collection, the rule and the two directives."""
    app.add_node(claims_view)
    app.add_directive("claim-map", ClaimMap)
    app.add_directive("ledger", Ledger)
    app.add_css_file("claims.css")
    app.connect("builder-inited", serve_stylesheet)
    app.connect("doctree-read", collect)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", refresh)
    app.connect("env-check-consistency", hold_to_the_rule)
    app.connect("doctree-resolved", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
