"""The book's own Sphinx extension: assets served from the site itself, and the rule of checks."""

import importlib
import importlib.util

from sphinx.application import Sphinx

from . import assets


def setup(app: Sphinx) -> dict[str, bool]:
    assets.setup(app)
    if importlib.util.find_spec(f"{__name__}.claims") is not None:
        importlib.import_module(f"{__name__}.claims").setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
