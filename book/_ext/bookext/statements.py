"""What a page states and what it checks, read from its document tree."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from docutils import nodes

from attention_dynamics.verification.myst import RECORD_ATTRIBUTE
from attention_dynamics.verification.record import KINDS, CheckRecord

#: Statements that hold only because a check says so.
CLAIMED = (
    "theorem",
    "lemma",
    "proposition",
    "corollary",
    "property",
    "criterion",
    "observation",
)
PREFIXES = ("eq-", "def-", "cited-")
#: Names that stay in lower case at the start of a title.
LOWER_CASE = ("tanh", "erf", "jvp", "vjp")
#: A mark of origin at the end of a title, which says nothing about the statement itself.
ORIGIN = re.compile(r"\s*\[(?:ours|paper|derived)\]\s*$")


@dataclass(frozen=True)
class Statement:
    """One numbered equation or one statement of the proof directives.

    ``kind`` is ``equation`` or the directive's name; ``anchor`` the id it has on its page.
    """

    label: str
    kind: str
    doc: str
    line: int
    title: str
    anchor: str

    @property
    def claimed(self) -> bool:
        """Whether it needs a passing check."""
        return self.kind in CLAIMED or (self.kind == "equation" and self.label.startswith("eq-"))

    @property
    def role(self) -> str:
        """``claim``, ``definition`` or ``cited``."""
        if self.claimed:
            return "claim"
        return "cited" if self.label.startswith("cited-") else "definition"

    @property
    def noun(self) -> str:
        """``Lemma``, ``Equation``, ..."""
        return self.kind.capitalize()


@dataclass(frozen=True)
class Page:
    """The statements of one page and the records of the checks that ran on it, in order."""

    doc: str
    title: str
    statements: tuple[Statement, ...] = ()
    records: tuple[CheckRecord, ...] = ()
    unlabelled: tuple[tuple[str, int], ...] = ()


@dataclass
class Claim:
    """A statement of the whole book with every record that bears its label."""

    statement: Statement
    records: list[CheckRecord] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``definition``, ``cited``, ``unchecked``, ``missed`` or the strongest evidence."""
        if not self.statement.claimed:
            return self.statement.role
        if not self.records:
            return "unchecked"
        if any(record.status == "missed" for record in self.records):
            return "missed"
        return min((record.kind for record in self.records), key=list(KINDS).index)

    @property
    def title(self) -> str:
        """A few human words: the statement's own title, its check's title, or its label."""
        titles = [self.statement.title, *(record.title for record in self.records)]
        words = next((title for title in titles if title), None)
        if words is None:
            words = self.statement.label.partition("-")[2].replace("-", " ")
        if words.startswith(LOWER_CASE):
            return words
        return words[:1].upper() + words[1:]

    @property
    def uses(self) -> tuple[str, ...]:
        """The labels it rests on, each once, in the order they were given."""
        return tuple(dict.fromkeys(label for record in self.records for label in record.uses))


def read_page(doc: str, title: str, tree: nodes.document) -> Page:
    """Statements and records of one document tree, before it is transformed for a builder."""
    statements, records, unlabelled = [], [], []
    for node in tree.findall(nodes.Element):
        line = node.line or 0
        if isinstance(node, nodes.math_block) and node.get("label"):
            label = node["label"]
            anchor = nodes.make_id(f"equation-{label}")
            statements.append(Statement(label, "equation", doc, line, "", anchor))
        elif node.get("realtype"):
            kind, label = node["realtype"], node["label"]
            if kind == "proof":
                continue
            if re.fullmatch(rf"{kind}-\d+", label):
                unlabelled.append((kind, line))
                continue
            statements.append(Statement(label, kind, doc, line, _title(node), node["ids"][0]))
        elif node.get(RECORD_ATTRIBUTE):
            records.append(CheckRecord.from_json(json.loads(node[RECORD_ATTRIBUTE])))
    return Page(doc, title, tuple(statements), tuple(records), tuple(unlabelled))


def claims_of(pages: Iterable[Page]) -> list[Claim]:
    """Every statement of the book with its records, in the order of ``pages``."""
    pages = list(pages)
    claims = {}
    for page in pages:
        for statement in page.statements:
            claims.setdefault(statement.label, Claim(statement))
    for page in pages:
        for record in page.records:
            if record.label in claims:
                claims[record.label].records.append(record)
    return list(claims.values())


def _title(node: nodes.Element) -> str:
    title = next((child for child in node.children if isinstance(child, nodes.title)), None)
    text = title.astext().strip() if title is not None else ""
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return ORIGIN.sub("", text).strip()
