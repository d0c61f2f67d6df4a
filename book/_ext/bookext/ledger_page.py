"""The ledger: every check that ran, counted by kind of evidence and listed page by page."""

from collections.abc import Sequence
from html import escape

from attention_dynamics.verification.ledger import count_by_kind
from attention_dynamics.verification.record import KINDS, CheckRecord

from .claim_layout import plain
from .claim_map import ICONS, STATUS, Link
from .statements import Claim, Page


def write(pages: Sequence[Page], claims: Sequence[Claim], link: Link) -> str:
    """Summary, counts and one table a page, as HTML; the same input gives the same bytes."""
    by_label = {claim.statement.label: claim for claim in claims}
    tables = "".join(_page(page, by_label, link) for page in pages if page.statements)
    return f'<div class="ledger">{_summary(claims)}{_counts(pages)}{tables}</div>'


def _summary(claims: Sequence[Claim]) -> str:
    claimed = [claim for claim in claims if claim.statement.claimed]
    unchecked = sum(claim.status == "unchecked" for claim in claimed)
    missed = sum(claim.status == "missed" for claim in claimed)
    others = len(claims) - len(claimed)
    words = (
        f"The book makes <strong>{len(claimed)} numbered claims</strong> and states {others} "
        f"definitions and citations. {len(claimed) - unchecked - missed} claims are checked and "
        "hold"
    )
    words += f", {missed} {'is' if missed == 1 else 'are'} measured outside the band" * bool(missed)
    words += f", {unchecked} {'has' if unchecked == 1 else 'have'} no passing check."
    return f'<p class="ledger-summary">{words}</p>'


def _counts(pages: Sequence[Page]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_status(count.kind, KINDS[count.kind].capitalize())}</th>'
        f'<td class="number">{count.checks}</td><td>{escape(count.note)}</td></tr>'
        for count in count_by_kind(record for page in pages for record in page.records)
    )
    return (
        '<table class="ledger-table ledger-counts"><caption>Checks by kind of evidence</caption>'
        '<thead><tr><th scope="col">Evidence</th><th scope="col" class="number">Checks</th>'
        f'<th scope="col">Range</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _page(page: Page, by_label: dict[str, Claim], link: Link) -> str:
    rows = "".join(_row(by_label[s.label], by_label, link) for s in page.statements if s.claimed)
    others = [by_label[s.label] for s in page.statements if not s.claimed]
    definitions = ", ".join(_link(claim, link) for claim in others)
    if definitions:
        definitions = f"<p>Defined or cited without a check: {definitions}.</p>"
    name = escape(plain(page.title))
    table = (
        f'<table class="ledger-table ledger-entries"><caption>Claims of “{name}”</caption>'
        '<thead><tr><th scope="col">Statement</th><th scope="col">Evidence</th>'
        f'<th scope="col">Rests on</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    href = escape(link(page.doc, "").rstrip("#"))
    return f'<h2><a href="{href}">{name}</a></h2>{table if rows else ""}{definitions}'


def _row(claim: Claim, by_label: dict[str, Claim], link: Link) -> str:
    statement = claim.statement
    evidence = "".join(f"<li>{_evidence(record)}</li>" for record in claim.records)
    if not claim.records:
        evidence = f"<li>{_status('unchecked', STATUS['unchecked'])}</li>"
    uses = "".join(
        f"<li>{_link(by_label[label], link) if label in by_label else escape(label)}</li>"
        for label in claim.uses
    )
    rests = f"<ul>{uses}</ul>" if uses else ""
    noun = "" if statement.kind == "equation" else f"{statement.noun}: "
    return (
        f'<tr id="ledger-{escape(statement.label)}"><th scope="row">{noun}{_link(claim, link)}'
        f'<span class="ledger-label">{escape(statement.label)}</span></th>'
        f"<td><ul>{evidence}</ul></td>"
        f'<td data-head="Rests on">{rests}</td></tr>'
    )


def _evidence(record: CheckRecord) -> str:
    status = "missed" if record.status == "missed" else record.kind
    if record.notation == "latex":
        shown = (
            '<span class="math notranslate nohighlight">'
            rf"\({escape(record.statement, quote=False)}\)</span>"
        )
    else:
        shown = f"<code>{escape(record.statement)}</code>"
    notes = []
    if record.kind == "autograd":
        rtol, atol = record.detail["rtol"], record.detail["atol"]
        allowed = f"relative {rtol:.0e}" + (f", absolute {atol:.0e}" if atol else "")
        notes.append(f"Tolerance: {allowed}; {record.detail['entries']} entries.")
    if record.detail.get("assumptions"):
        used = ", ".join(
            rf'<span class="math notranslate nohighlight">\({escape(text, quote=False)}\)</span>'
            for text in record.detail["assumptions"]
        )
        notes.append(f"Assumes {used}.")
    if record.detail.get("given"):
        used = ", ".join(
            rf'<span class="math notranslate nohighlight">\({escape(text, quote=False)}\)</span>'
            for text in record.detail["given"]
        )
        notes.append(f"Given {used}.")
    refuted = escape(str(record.wrong_twin.get("refuted", "")))
    notes.append(f"Wrong twin: {refuted}.")
    body = "".join(f'<div class="ledger-expression">{note}</div>' for note in notes)
    return (
        f"{_status(status, record.evidence)}<details><summary>checked expression</summary>"
        f'<div class="ledger-expression">{shown}</div>{body}</details>'
    )


def _status(status: str, words: str) -> str:
    return (
        f'<span class="ledger-status claim-{status}"><svg class="claim-icon" '
        f'viewBox="-7 -7 14 14" aria-hidden="true">{ICONS[status]}</svg>{escape(words)}</span>'
    )


def _link(claim: Claim, link: Link) -> str:
    statement = claim.statement
    href = escape(link(statement.doc, statement.anchor))
    return f'<a href="{href}">{escape(plain(claim.title))}</a>'
