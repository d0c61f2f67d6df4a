"""Where the nodes of the map of claims stand: a column a chapter, statements in reading order."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .statements import Claim, Page

COLUMN, GUTTER, SHELF = 178.0, 36.0, 3  # width of a column, space between two, columns side by side
LINE, PADDING, GAP = 16.0, 6.5, 7.0  # of the text in a node, around it, between two nodes
FONT = 13.0
TEXT_LEFT, TEXT_RIGHT = 27.0, 9.0  # where the text starts in a node; what stays free after it
HEADING = 62.0
MARGIN = 20.0

LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "varphi": "φ", "phi": "φ", "chi": "χ", "psi": "ψ",
    "omega": "ω",
    "le": " ≤ ", "ge": " ≥ ", "to": " → ", "infty": "∞", "cdot": "·", "times": "×", "ast": "*",
    "ell": "ℓ", "sqrt": "√", "partial": "∂", "nabla": "∇",
}  # fmt: skip
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Node:
    """One statement on the map: its box, and its title broken into lines."""

    claim: Claim
    column: int
    x: float
    y: float
    height: float
    lines: tuple[str, ...]

    @property
    def middle(self) -> float:
        """Half-way down."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Heading:
    """The title of a chapter above its column."""

    page: Page
    x: float
    y: float
    lines: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Edge:
    """From what is used to what uses it; node numbers, and the path between their boxes."""

    source: int
    target: int
    path: str


@dataclass(frozen=True)
class Layout:
    """The whole map."""

    width: float
    height: float
    headings: tuple[Heading, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def lay_out(pages: Sequence[Page], claims: Iterable[Claim]) -> Layout:
    """Columns side by side, at most four, then the next shelf below."""
    by_doc: dict[str, list[Claim]] = {}
    for claim in claims:
        by_doc.setdefault(claim.statement.doc, []).append(claim)
    shown = [page for page in pages if page.doc in by_doc]
    headings: list[Heading] = []
    nodes: list[Node] = []
    top = bottom = 10.0
    for number, page in enumerate(shown):
        place = number % SHELF
        if place == 0 and number:
            top = bottom + 34
        x = MARGIN + place * (COLUMN + GUTTER)
        own = by_doc[page.doc]
        headings.append(Heading(page, x, top, _wrap(plain(page.title), 14, COLUMN, 2), _note(own)))
        y = top + HEADING + 12
        for claim in own:
            bold = claim.statement.claimed and claim.statement.kind != "equation"
            width = COLUMN - TEXT_LEFT - TEXT_RIGHT
            lines = _wrap(plain(claim.title), FONT * (1.05 if bold else 1), width, 3)
            height = 2 * PADDING + LINE * len(lines)
            nodes.append(Node(claim, number, x, y, height, lines))
            y += height + GAP
        bottom = max(bottom, y)
    columns = min(len(shown), SHELF)
    width = MARGIN + columns * COLUMN + max(columns - 1, 0) * GUTTER + 12
    return Layout(width, bottom + 4, tuple(headings), tuple(nodes), _edges(nodes))


def plain(text: str) -> str:
    r"""A title without markup: ``$\kappa^*$`` becomes ``κ*``."""
    text = re.sub(r"\\([A-Za-z]+)\s*", lambda m: LETTERS.get(m[1], ""), text.replace("$", ""))
    text = re.sub(r"_(\d)|_\{(\d+)\}", lambda m: (m[1] or m[2]).translate(SUBSCRIPT), text)
    text = re.sub(r"\^(\d)|\^\{(-?\d+)\}", lambda m: (m[1] or m[2]).translate(SUPERSCRIPT), text)
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text).replace("^(-", "^(−").replace("^*", "*")
    return re.sub(r"\s+", " ", re.sub(r"[{}\\]", "", text)).strip()


def text_width(text: str, size: float) -> float:
    """An estimate of the width of a text in a common sans serif, a little on the safe side."""
    return size * sum(_character(character) for character in text)


def _character(character: str) -> float:
    if character in "iljtfrI.,:;'|!()[]- ":
        return 0.33
    if character in "mwMW":
        return 0.87
    return 0.7 if character.isupper() else 0.57


def _wrap(text: str, size: float, width: float, limit: int) -> tuple[str, ...]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    kept = lines[:limit]
    overflow = len(lines) > limit
    while overflow or text_width(kept[-1], size) > width:
        shorter = kept[-1].rstrip("…")[:-1].rstrip()
        kept[-1] = f"{shorter}…"
        overflow = False
        if not shorter:
            break
    return tuple(kept)


def _note(claims: list[Claim]) -> str:
    claimed = sum(claim.statement.claimed for claim in claims)
    others = len(claims) - claimed
    words = [f"{claimed} claim{'s' * (claimed != 1)}"] if claimed else []
    words += [f"{others} definition{'s' * (others != 1)}"] if others else []
    return ", ".join(words)


def _edges(nodes: list[Node]) -> tuple[Edge, ...]:
    number = {node.claim.statement.label: index for index, node in enumerate(nodes)}
    return tuple(
        Edge(number[used], target, _path(nodes[number[used]], node))
        for target, node in enumerate(nodes)
        for used in node.claim.uses
        if used in number and number[used] != target
    )


def _path(source: Node, target: Node) -> str:
    end_x, end_y = target.x, target.middle
    if source.x == target.x and source.column == target.column:
        bulge = min(12 + 0.09 * abs(end_y - source.middle), GUTTER * 0.62)
        return (
            f"M{source.x:.1f} {source.middle:.1f}C{source.x - bulge:.1f} {source.middle:.1f} "
            f"{end_x - bulge:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
        )
    start_x = source.x + COLUMN
    if source.x >= target.x:  # back to an earlier column, or down to the next shelf
        reach = GUTTER * 0.9
        return (
            f"M{start_x:.1f} {source.middle:.1f}C{start_x + reach:.1f} {source.middle:.1f} "
            f"{end_x - reach:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
        )
    reach = max(GUTTER * 0.55, (end_x - start_x) * 0.42)
    return (
        f"M{start_x:.1f} {source.middle:.1f}C{start_x + reach:.1f} {source.middle:.1f} "
        f"{end_x - reach:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
    )
