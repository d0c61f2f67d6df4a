"""The rule of the book: every numbered statement is a definition, cited, or checked."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .statements import CLAIMED, PREFIXES, Page


@dataclass(frozen=True)
class Breach:
    """One breach of the rule, on a page."""

    doc: str
    line: int
    message: str


def breaches(pages: Iterable[Page]) -> list[Breach]:
    """Every breach, in the order of ``pages``.

    A claim without a record, or with records on another page only; a claim other than an
    observation whose only records missed their bands; a record whose label stands nowhere, or that
    is checked on two pages; an unlabelled statement; a label that stands twice; a numbered equation
    without a known prefix; a label in ``uses`` that stands nowhere, or is the statement itself.
    """
    pages = list(pages)
    where = {s.label: s for page in pages for s in page.statements}
    stands = Counter(s.label for page in pages for s in page.statements)
    held = {r.label for page in pages for r in page.records if r.status == "passed"}
    checked: dict[str, list[str]] = {}
    for page in pages:
        for record in page.records:
            checked.setdefault(record.label, []).append(page.doc)
    found = []
    for page in pages:
        for kind, line in page.unlabelled:
            if kind in CLAIMED:
                found.append(
                    Breach(page.doc, line, f"a {kind} has no label: add :label: and a check")
                )
        for statement in page.statements:
            label = statement.label
            docs = checked.get(label, [])
            if statement.kind == "equation" and not label.startswith(PREFIXES):
                message = (
                    f"equation {label!r} is numbered, but its label says neither eq- (checked) nor "
                    "def- (definition) nor cited-: rename it, or leave the number out"
                )
            elif stands[label] > 1:
                # One check would speak for both.
                message = f"{statement.kind} {label!r} stands {stands[label]} times: rename one"
            elif statement.claimed and not docs:
                message = f"{statement.kind} {label!r} has no passing check"
            elif statement.claimed and statement.kind != "observation" and label not in held:
                message = (
                    f"{statement.kind} {label!r} has no passing check, only a band it missed: "
                    "state what was measured as an observation"
                )
            elif statement.claimed and page.doc not in docs:
                message = (
                    f"{statement.kind} {label!r} is checked on {docs[0]}, not here: the check "
                    "belongs under the statement"
                )
            else:
                continue
            found.append(Breach(page.doc, statement.line, message))
        for record in page.records:
            if record.label not in where:
                found.append(
                    Breach(page.doc, 0, f"a check names {record.label!r}, which stands nowhere")
                )
            elsewhere = sorted(set(checked[record.label]) - {page.doc})
            if elsewhere:
                found.append(
                    Breach(
                        page.doc,
                        0,
                        f"{record.label!r} is checked here and on {', '.join(elsewhere)}",
                    )
                )
            for used in record.uses:
                if used not in where:
                    message = f"the check of {record.label!r} uses {used!r}, which stands nowhere"
                    found.append(Breach(page.doc, 0, message))
                elif used == record.label:
                    message = f"the check of {record.label!r} says that it uses itself"
                    found.append(Breach(page.doc, 0, message))
    return list(dict.fromkeys(found))
