"""What the library reference leaves out: entries that say nothing."""

from sphinx.application import Sphinx


def skip_positions(app: Sphinx, what, name, obj, skip, options) -> bool | None:
    """Leave out the fields of named tuples: their docstrings only count them."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_positions)
