"""The book's own Sphinx extension: assets from the site itself, reference, rule of checks."""

from sphinx.application import Sphinx

from . import assets, claims, reference


def setup(app: Sphinx) -> dict[str, bool]:
    for part in (assets, claims, reference):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
