"""The text below an attribute opens without a colon; Sphinx takes what precedes one for a type."""

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LITERAL = re.compile(r"(:[\w:]+:`[^`]*`|``[^`]*``|`[^`]*`)")


def opening_colons(source: str) -> list[str]:
    """The first lines, in the text below an assignment, that Sphinx would split at a colon."""
    found = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        for before, after in itertools.pairwise(body) if isinstance(body, list) else ():
            assigned = isinstance(before, ast.Assign | ast.AnnAssign)
            text = after.value if isinstance(after, ast.Expr) else None
            if assigned and isinstance(text, ast.Constant) and isinstance(text.value, str):
                first = text.value.strip().splitlines()[0]
                if re.search(r"(?<!:):(?!:)", LITERAL.sub("", first)):
                    found.append(first)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_attribute_text_opens_with_a_type(path):
    assert opening_colons(path.read_text(encoding="utf-8")) == []


def test_a_colon_is_found_but_none_in_a_role_or_a_literal():
    assert opening_colons('x = 1\n"""Slopes in T: of the loss."""') == ["Slopes in T: of the loss."]
    assert opening_colons('class A:\n    x: int = 1\n    """Type: it."""') == ["Type: it."]
    assert opening_colons('x = 1\nr""":math:`T`, ``a: b`` of `c: d`\n\nLater: free."""') == []
