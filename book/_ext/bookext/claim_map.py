"""The map of claims as inline SVG: every node a link, coloured by what its check established."""

from collections.abc import Callable, Sequence
from html import escape

from .claim_layout import (
    COLUMN,
    FONT,
    LINE,
    TEXT_LEFT,
    Heading,
    Layout,
    Node,
    lay_out,
    plain,
)
from .statements import Claim, Page

Link = Callable[[str, str], str]

#: What each status means, in the legend and in the nodes' descriptions.
STATUS = {
    "definition": "definition",
    "cited": "cited",
    "proved": "proved by computer algebra",
    "certified": "certified by interval arithmetic",
    "numeric": "agrees to 40 digits",
    "autograd": "agrees with float64",
    "attacked": "bound survives attack",
    "band": "measured inside its band",
    "missed": "measured, band missed",
    "unchecked": "no passing check",
}

#: Every status has a shape of its own, so that no reader depends on the colour.
ICONS = {
    "definition": '<circle r="4" fill="none" stroke-width="1.6"/>',
    "cited": '<path d="M-3 -4v8M3 -4v8" fill="none" stroke-width="2"/>',
    "proved": '<rect x="-4.5" y="-4.5" width="9" height="9" rx="1.2"/>',
    "certified": '<path d="M-2 -4.5h-2.5v9h2.5M2 -4.5h2.5v9h-2.5" fill="none" stroke-width="1.6"/>'
    '<circle r="1.8"/>',
    "numeric": '<circle r="4.2" fill="none" stroke-width="1.6"/><circle r="1.5"/>',
    "autograd": '<circle r="4.5"/>',
    "attacked": '<path d="M0 -5.4 5.2 0 0 5.4 -5.2 0z"/>',
    "band": '<path d="M-5 -4v8M5 -4v8M-5 0h10" fill="none" stroke-width="1.5"/><circle r="2.6"/>',
    "missed": '<path d="M-5.5 -4v8M1.5 -4v8M-5.5 0h7" fill="none" stroke-width="1.5"/>'
    '<circle cx="4.4" r="2.6"/>',
    "unchecked": '<path d="M-4 -4 4 4M4 -4 -4 4" fill="none" stroke-width="2.4"/>',
}


def draw(pages: Sequence[Page], claims: Sequence[Claim], link: Link) -> str:
    """The map with its legend, as one HTML figure; the same input gives the same bytes."""
    layout = lay_out(pages, claims)
    if not layout.nodes:
        return '<p class="claim-map-empty">No statement has been read yet.</p>'
    present = [status for status in STATUS if any(c.status == status for c in claims)]
    legend = "".join(
        f'<li><svg class="claim-icon claim-{s}" viewBox="-7 -7 14 14" aria-hidden="true">'
        f"{ICONS[s]}</svg>{STATUS[s]}</li>"
        for s in present
    )
    return (
        '<figure class="claim-map"><div class="claim-map-scroll" tabindex="0" role="region" '
        'aria-label="Map of claims, scrolls sideways on narrow screens">'
        f"{_svg(layout, claims, link)}</div>"
        f'<figcaption><ul class="claim-legend">{legend}</ul></figcaption></figure>'
    )


def _svg(layout: Layout, claims: Sequence[Claim], link: Link) -> str:
    edges = "".join(
        f'<path class="edge from-{edge.source} into-{edge.target}" d="{edge.path}"/>'
        for edge in layout.edges
    )
    nodes = "".join(_node(number, node, link) for number, node in enumerate(layout.nodes))
    targets = sorted({edge.target for edge in layout.edges})
    heads = "".join(
        f'<path class="head" d="M{n.x:.1f} {n.middle:.1f}l-6 -3.4v6.8z"/>'
        for n in (layout.nodes[target] for target in targets)
    )
    headings = "".join(_heading(heading, link) for heading in layout.headings)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="group" '
        'aria-labelledby="claim-map-title claim-map-text" '
        f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" '
        f'style="--claim-map-width:{layout.width:.0f}px">'
        '<title id="claim-map-title">Map of claims</title>'
        f'<desc id="claim-map-text">{escape(_summary(layout, claims))}</desc>'
        f"<style>{_highlights(layout)}</style>"
        f'<g class="edges" aria-hidden="true">{edges}{heads}</g>{headings}{nodes}</svg>'
    )


def _summary(layout: Layout, claims: Sequence[Claim]) -> str:
    counts = [(status, sum(c.status == status for c in claims)) for status in STATUS]
    words = ", ".join(f"{count} {STATUS[status]}" for status, count in counts if count)
    return (
        f"{len(layout.nodes)} statements in {len(layout.headings)} chapters, one column each, in "
        f"reading order; {len(layout.edges)} arrows from what is used to what uses it. {words}."
    )


def _highlights(layout: Layout) -> str:
    """A node under the pointer or the focus shows its own arrows and quietens the others."""
    rules = []
    for number in sorted({n for edge in layout.edges for n in (edge.source, edge.target)}):
        active = f".claim-map svg:has(#claim-node-{number}:is(:hover,:focus-visible))"
        rules.append(
            f"{active} .edge:is(.from-{number},.into-{number})"
            "{opacity:1;stroke-width:1.8;stroke:var(--claim-highlight)}"
        )
    return "".join(rules)


def _heading(heading: Heading, link: Link) -> str:
    lines = "".join(
        f'<tspan x="{heading.x:.1f}" y="{heading.y + 18 + 17 * (k + 2 - len(heading.lines)):.1f}">'
        f"{escape(line)}</tspan>"
        for k, line in enumerate(heading.lines)
    )
    y = heading.y + 44
    href = escape(link(heading.page.doc, "").rstrip("#"))
    title = escape(plain(heading.page.title))
    return (
        f'<a href="{href}" class="claim-chapter" aria-label="Chapter: {title}">'
        f'<text class="chapter">{lines}</text></a>'
        f'<path class="rule" d="M{heading.x:.1f} {y:.1f}h{COLUMN:.1f}"/>'
        f'<text class="note" x="{heading.x:.1f}" y="{y + 17:.1f}">{escape(heading.note)}</text>'
    )


def _node(number: int, node: Node, link: Link) -> str:
    claim, statement = node.claim, node.claim.statement
    status = claim.status
    title = plain(claim.title)
    evidence = "; ".join(record.evidence for record in claim.records) or STATUS[status]
    first = node.middle - LINE * (len(node.lines) - 1) / 2 + FONT * 0.36
    lines = "".join(
        f'<tspan x="{node.x + TEXT_LEFT:.1f}" y="{first + LINE * k:.1f}">{escape(line)}</tspan>'
        for k, line in enumerate(node.lines)
    )
    box = (
        f'x="{node.x:.1f}" y="{node.y:.1f}" width="{COLUMN:.1f}" height="{node.height:.1f}" rx="5"'
    )
    weight = "statement" if statement.claimed and statement.kind != "equation" else "line"
    described = f"{statement.noun}: {title}. {STATUS[status].capitalize()}."
    return (
        f'<a id="claim-node-{number}" class="claim claim-{status} claim-{weight}" '
        f'href="{escape(link(statement.doc, statement.anchor))}" '
        f'data-label="{escape(statement.label)}" aria-label="{escape(described)}">'
        f"<title>{escape(f'{statement.noun}: {title} ({evidence})')}</title>"
        f'<rect class="paper" {box}/><rect class="tint" {box}/>'
        f'<g class="claim-icon" transform="translate({node.x + 14:.1f} {node.middle:.1f})">'
        f"{ICONS[status]}</g><text>{lines}</text></a>"
    )
