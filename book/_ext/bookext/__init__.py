"""The book's own Sphinx extension: assets served from the site itself, and the rule of checks."""

from sphinx.application import Sphinx

from . import assets, claims


def setup(app: Sphinx) -> dict[str, bool]:
    assets.setup(app)
    return claims.setup(app)
