"""Open pages of a built site in headless Chromium, network blocked, and say what is wrong."""

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, Page, Request, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
#: Width and height of a desktop window and of a small phone, in CSS pixels.
DESKTOP, PHONE = (1280, 900), (390, 844)

HOW_TO_GET_CHROMIUM = (
    "no Chromium found on the PATH as 'chromium', 'chromium-browser' or 'google-chrome'. "
    "On Debian: apt-get install chromium; on Ubuntu: snap install chromium; "
    "on macOS: brew install chromium"
)

#: Everything wrong with a page that its finished document shows.
FAULTS = r"""
() => {
  const article = document.querySelector('article') || document.body;
  const faults = [];
  const text = element => element.textContent.trim().slice(0, 80);
  for (const error of document.querySelectorAll('mjx-merror')) {
    const message = error.getAttribute('data-mjx-error') || text(error);
    faults.push('bad formula, MathJax says: ' + message);
  }
  const formulas = [...document.querySelectorAll('.math')];
  const rendered = document.querySelectorAll('.math mjx-container').length;
  for (const formula of formulas) {
    if (formula.querySelector('mjx-container')) continue;
    faults.push('unrendered formula: ' + text(formula));
  }
  if (rendered !== formulas.length)
    faults.push(`${formulas.length} formulas but ${rendered} rendered`);
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!/\\[(\[]/.test(node.data)) continue;
    if (!node.parentElement.closest('pre, code, script, style, mjx-container'))
      faults.push('raw LaTeX in the text: ' + node.data.trim().slice(0, 80));
  }
  for (const image of article.querySelectorAll('img:not(.toggler)')) {
    const alt = (image.getAttribute('alt') || '').trim();
    if (alt.length < 12 || !alt.includes(' ') || /\.(png|svg|jpe?g)$/.test(alt))
      faults.push(`image without a meaningful alt text: ${image.getAttribute('src')} ("${alt}")`);
    if (!image.complete || image.naturalWidth === 0)
      faults.push('image that does not load: ' + image.getAttribute('src'));
  }
  for (const drawing of article.querySelectorAll('svg:not([aria-hidden="true"])')) {
    if (drawing.closest('a.headerlink, button, mjx-container')) continue;
    if (!drawing.querySelector('title') && !drawing.getAttribute('aria-label'))
      faults.push('drawing without a title: ' + drawing.outerHTML.slice(0, 80));
  }
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1)
    faults.push(`page ${document.documentElement.scrollWidth} px wide in a window of ${width} px`);
  const scrolls = element => {
    for (let e = element; e && e !== article; e = e.parentElement)
      if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  for (const wide of article.querySelectorAll('.math, table, img, svg, pre, .check-line')) {
    const box = wide.getBoundingClientRect();
    if (box.width > 0 && (box.right > width + 1 || box.left < -1) && !scrolls(wide))
      faults.push(`cut off at ${width} px: <${wide.tagName.toLowerCase()}> ` + text(wide));
  }
  return faults;
}
"""


@dataclass
class Visit:
    """What one look at one page brought up; empty ``faults`` is a clean page."""

    address: str
    theme: str = ""
    faults: list[str] = field(default_factory=list)


def find_chromium() -> str | None:
    """Path of an installed Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium; RuntimeError says how to get one where none is found."""
    executable = find_chromium()
    if executable is None:
        raise RuntimeError(HOW_TO_GET_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the faults of a page are reported by its visit."""


@contextmanager
def serve(site: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; yields the origin."""
    handler = functools.partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _settle(page: Page) -> None:
    """Wait until MathJax, where a page loads it, has set every formula, and images are there."""
    page.evaluate("() => window.MathJax?.startup?.promise?.then(() => true)")
    page.evaluate(
        "() => Promise.all([...document.images].map(image => {"
        " image.loading = 'eager'; return image.decode().catch(() => 0); }))"
    )


def visit(
    browser: Browser,
    origin: str,
    name: str,
    *,
    size: tuple[int, int] = DESKTOP,
    dark: bool = False,
    screenshot: Path | None = None,
) -> Visit:
    """Open ``origin/name`` and collect external requests, console messages and visible faults."""
    seen = Visit(f"{origin}/{name}")
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        is_mobile=size[0] < 600,
    )
    page = context.new_page()

    def note_request(request: Request) -> None:
        if not request.url.startswith((f"{origin}/", "data:", "blob:")):
            seen.faults.append(f"external request: {request.url}")

    page.on("request", note_request)
    page.on("requestfailed", lambda r: seen.faults.append(f"failed request: {r.url}"))
    page.on("console", lambda m: seen.faults.append(f"console {m.type}: {m.text}"))
    page.on("pageerror", lambda e: seen.faults.append(f"script error: {e.stack or e}"))
    try:
        page.goto(seen.address, wait_until="load")
        _settle(page)
        seen.faults += page.evaluate(FAULTS)
        seen.theme = page.evaluate("() => document.documentElement.dataset.theme || ''")
        if screenshot is not None:
            screenshot.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=screenshot, full_page=True)
    finally:
        context.close()
    return seen
