"""Links and anchors of a built site, checked in its files without a browser."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

#: Attributes that make a browser fetch or follow something.
LINKING = {("a", "href"), ("img", "src"), ("link", "href"), ("script", "src"), ("source", "src")}


@dataclass
class Anchors(HTMLParser):
    """The ids a page offers and the addresses it points at."""

    ids: set[str] = field(default_factory=set)
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        for name in ("id", "name"):
            if value := attributes.get(name):
                self.ids.add(value)
        canonical = tag == "link" and attributes.get("rel") == "canonical"
        for name, value in attrs:
            # SVG links carry xlink:href on any element; all of them count.
            if value and ((tag, name) in LINKING or name == "xlink:href") and not canonical:
                self.addresses.append(value)


def html_files(site: Path) -> list[Path]:
    """Every page of the site, in a fixed order, without the files MathJax brings."""
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def read(page: Path) -> Anchors:
    anchors = Anchors()
    anchors.feed(page.read_text("utf8"))
    return anchors


def broken_links(site: Path) -> list[str]:
    """One line for each internal address that leads nowhere: file or fragment missing."""
    pages = {page.resolve(): read(page) for page in html_files(site)}
    broken = []
    for page, anchors in pages.items():
        name = page.relative_to(site.resolve())
        for address in anchors.addresses:
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            path, fragment = urldefrag(address)
            path = unquote(urlsplit(path).path)
            if path.startswith("/"):
                broken.append(f"{name}: {address} is absolute and fails when opened from disk")
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.is_file():
                broken.append(f"{name}: {address} leads to no file")
            elif fragment and target in pages and unquote(fragment) not in pages[target].ids:
                broken.append(f"{name}: {address} leads to no such anchor")
    return broken
