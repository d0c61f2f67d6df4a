r"""The bound explorer in a browser: every slider by keyboard, against the calculator's numbers."""

from __future__ import annotations

import re
from contextlib import contextmanager

import numpy as np
import pytest

from attention_dynamics.plotting import bound_explorer
from attention_dynamics.plotting._digits import integer, number, rounded_up
from attention_dynamics.theory import UNIT_BALL, TransportNorms
from attention_dynamics.theory.bound_table import Stops, bound_table
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.setting import TERMS, Setting
from attention_dynamics.training import Radii

FEW = Stops((8, 64, 2**14, 2**22), (100, 5000, 10**6), (4, 16, 4096), (2, 8, 64), (10, 4000, 10**6))
PAPER = BoundCalculator(form="paper", concentration="largest", tail="mcdiarmid", error="sup")
FIRST = {"heads": 64, "samples": 5000, "length": 16, "dimension": 8, "steps": 4000}
DARK, LIGHT = "dark", "light"

#: The least contrast of any text with the ground it stands on, and the text.
CONTRAST = r"""
() => {
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const root = document.querySelector('.bound-explorer');
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || e.closest('script, style')) continue;
    if (!e.getClientRects().length) continue;
    found.push([ratio(parse(getComputedStyle(e).color), ground(e)), walker.currentNode.data]);
  }
  for (const bar of root.querySelectorAll('[data-bar]'))  // 3 is enough for a drawing
    found.push([1.5 * ratio(parse(getComputedStyle(bar).backgroundColor),
      ground(root.querySelector('.be-result'))), bar.dataset.bar]);
  return found.sort((a, b) => a[0] - b[0])[0];
}
"""


@pytest.fixture(scope="module")
def explorer():
    return bound_explorer(bound_table(FEW))._repr_html_()


@contextmanager
def opened(browser, folder, body, *, scheme=LIGHT, width=1000, script=True, attributes="", head=""):
    """The page of ``body`` from disk; whatever it says to the console or asks for is a fault."""
    path = folder / "page.html"
    path.write_text(
        f'<!doctype html><html lang="en" {attributes}><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{head}'
        f"<title>Explorer</title></head><body>{body}</body></html>",
        "utf8",
    )
    context = browser.new_context(
        viewport={"width": width, "height": 812}, color_scheme=scheme, is_mobile=width < 600,
        java_script_enabled=script,
    )  # fmt: skip
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(error.stack))
    page.on("request", lambda request: faults.append(request.url))
    try:
        page.goto(path.as_uri(), wait_until="load")
        yield page
    finally:
        context.close()
    assert faults == [path.as_uri()]


def expected(sizes, version="book", step_size=None):
    """The numbers a fresh calculator gives, as texts."""
    setting = Setting(
        **sizes, radii=Radii(3, 3, 3), transport_norms=TransportNorms(3, 3, 3), inputs=UNIT_BALL,
        step_size=step_size,
    )  # fmt: skip
    bound = (PAPER if version == "paper" else BoundCalculator()).bound(setting)
    power = 2 if bound.form == "fast" else 1
    values = {term: getattr(bound.terms, term) ** power for term in TERMS}
    values |= {"total": bound.total, "kappa": bound.kappa}
    return {name: number(float(rounded_up(np.array(v)))) for name, v in values.items()}, bound


def shown(page):
    names = (*TERMS, "total", "kappa")
    return {name: page.locator(f'[data-number="{name}"]').last.text_content() for name in names}


def visible_states(page):
    parts = page.locator("[data-when]:visible").all()
    return {part.get_attribute("data-when") for part in parts}


def widths(page):
    styles = [bar.get_attribute("style") for bar in page.locator("[data-bar]").all()]
    return [float(re.fullmatch(r"width: ?([\d.]+)%;?", style).group(1)) for style in styles]


def slider(page, name):
    return page.locator(f'[data-axis="{name}"] input')


@pytest.mark.parametrize("version", ["book", "paper"])
@pytest.mark.parametrize("step_size", [None, 0.02], ids=["decreasing", "constant"])
def test_every_slider_moves_by_keyboard_to_the_calculators_numbers(
    version, step_size, explorer, browser, tmp_path
):
    with opened(browser, tmp_path, explorer) as page:
        page.locator(f'input[name="version"][value="{int(version == "paper")}"]').check()
        page.locator(f'input[name="step_rule"][value="{int(step_size is not None)}"]').check()
        for name, first in FIRST.items():
            slider(page, name).focus()
            page.keyboard.press("Home")
            for at, stop in enumerate(getattr(FEW, name)):
                if at:
                    page.keyboard.press("ArrowRight")
                texts, bound = expected(FIRST | {name: stop}, version, step_size)
                assert shown(page) == texts
                states = {bound.form, "vacuous" if bound.total > 1 else "useful"}
                assert visible_states(page) == states | ({"large"} if bound.kappa >= 1 else set())
                assert slider(page, name).get_attribute("aria-valuetext").startswith(integer(stop))
                said = page.locator('[role="status"]').text_content()
                assert f"= {integer(stop)}" in said
                assert f"total {texts['total']}" in said
                assert ("κ ≥ 1" in said) == (bound.kappa >= 1)
            page.keyboard.press("Home")
            for _ in range(getattr(FEW, name).index(first)):
                page.keyboard.press("ArrowRight")


def test_the_sequence_length_visibly_has_no_effect(explorer, browser, tmp_path):
    with opened(browser, tmp_path, explorer) as page:
        for version in (0, 1):
            page.locator(f'input[name="version"][value="{version}"]').check()
            before = shown(page), widths(page)
            slider(page, "length").focus()
            for key in ("Home", "End"):
                page.keyboard.press(key)
                assert (shown(page), widths(page)) == before
                assert "no effect" in page.locator('[role="status"]').text_content()
            assert page.locator('[data-axis="length"] .be-same').is_visible()
            profile = page.locator('[data-axis="length"] .be-profile').get_attribute("d")
            assert len(set(re.findall(r"\S+ (\S+?)(?:L|$)", profile[1:]))) == 1, "a flat line"
            assert page.locator('[data-axis="samples"] .be-same').is_visible() == (version == 0)
            assert not page.locator('[data-axis="heads"] .be-same').is_visible()


def test_bars_are_where_the_logarithm_puts_them_and_the_mark_at_one(explorer, browser, tmp_path):
    with opened(browser, tmp_path, explorer) as page:
        page.add_style_tag(content="* { transition: none !important }")
        slider(page, "heads").focus()
        page.keyboard.press("End")
        texts, bound = expected(FIRST | {"heads": 2**22})
        assert bound.total < 1
        track = page.locator(".be-total .be-track").bounding_box()
        ticks = {
            tick.text_content(): tick.bounding_box() for tick in page.locator(".be-axis span").all()
        }
        middle = {text: box["x"] + box["width"] / 2 for text, box in ticks.items()}
        decade = (middle["10²"] - middle["1"]) / 2
        end = page.locator('[data-bar="total"]').bounding_box()
        at = (end["x"] + end["width"] - middle["1"]) / decade
        assert at == pytest.approx(np.log10(float(texts["total"])), abs=0.05)
        mark = track["x"] + track["width"] * float(
            re.search(r"--mark:([\d.]+)%", explorer).group(1)
        ) / 100  # fmt: skip
        assert mark == pytest.approx(middle["1"], abs=1)


def test_reset_leads_back_to_the_first_view(explorer, browser, tmp_path):
    with opened(browser, tmp_path, explorer) as page:
        first = shown(page), widths(page)
        for name in FIRST:
            slider(page, name).focus()
            page.keyboard.press("End")
        page.locator('input[name="version"][value="1"]').check()
        assert (shown(page), widths(page)) != first
        page.keyboard.press("Enter")  # leaves no page
        page.get_by_role("button", name="Reset").click()
        assert (shown(page), widths(page)) == first
        assert slider(page, "heads").input_value() == "1"


def test_two_explorers_of_a_page_do_not_touch_each_other(explorer, browser, tmp_path):
    other = bound_explorer(bound_table(FEW, norm=1.0))._repr_html_()
    with opened(browser, tmp_path, explorer + other + explorer) as page:
        boxes = page.locator(".bound-explorer")
        before = [
            boxes.nth(i).locator('[data-number="total"]').first.text_content() for i in range(3)
        ]
        assert before[0] == before[2] != before[1]
        boxes.nth(2).locator('[data-axis="heads"] input').focus()
        page.keyboard.press("End")
        boxes.nth(2).locator('input[name="version"][value="1"]').check()
        after = [
            boxes.nth(i).locator('[data-number="total"]').first.text_content() for i in range(3)
        ]
        assert after[:2] == before[:2]
        assert after[2] != before[2]
        assert boxes.nth(0).locator('input[name="version"][value="0"]').is_checked()


def test_the_first_view_is_the_same_with_and_without_a_script(explorer, browser, tmp_path):
    views = []
    for script in (True, False):
        with opened(browser, tmp_path, explorer, script=script) as page:
            sizes = [part.text_content() for part in page.locator(".be-notes [data-size]").all()]
            views.append((shown(page), widths(page), sizes, visible_states(page)))
            assert page.locator(".be-static").is_visible() == (not script)
            assert slider(page, "heads").is_visible() == script
    assert views[0] == views[1]


def test_paper_shows_the_numbers_and_no_sliders(explorer, browser, tmp_path):
    with opened(browser, tmp_path, explorer) as page:
        page.emulate_media(media="print")
        assert not slider(page, "heads").is_visible()
        assert page.locator('[data-bar="total"]').is_visible()
        assert page.locator(".be-notes [data-size]").first.is_visible()


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("ground", ["browser", "book", "jupyterlab"])
def test_text_is_legible_in_the_light_and_in_the_dark(ground, scheme, explorer, browser, tmp_path):
    other = LIGHT if scheme == DARK else DARK
    if ground == "book":  # the theme of the page wins over that of the system
        options = {"attributes": f'data-theme="{scheme}"', "scheme": other}
    elif ground == "jupyterlab":
        options = {"scheme": other, "head": """<script>addEventListener("DOMContentLoaded", () =>
            document.body.dataset.jpThemeLight = "%s")</script><style>:root {
            --jp-content-font-color1: %s; --jp-content-font-color2: %s; --jp-layout-color2: %s}
            </style>""" % (("false", "white", "#bdbdbd", "#212121") if scheme == DARK else
                           ("true", "black", "#424242", "#eeeeee"))}  # fmt: skip
    else:
        options = {"scheme": scheme}
    if ground == "book" and scheme == DARK:  # as in the stylesheet of the book
        options["head"] = """<style>:root { --pst-color-text-base: #d8dee6; --book-quiet: #9aa6b2;
            --book-tint: #1a2027; --book-rule: #343d47 }</style>"""
    with opened(browser, tmp_path, explorer, **options) as page:
        for press in ("Home", "End"):  # kappa >= 1 and its flag, then a bound below 1
            for name in ("steps", "heads"):
                slider(page, name).focus()
                page.keyboard.press(press)
            ratio, text = page.evaluate(CONTRAST)
            assert ratio >= 4.5, text
        dark = page.evaluate(
            "() => getComputedStyle(document.querySelector('.be-panel')).colorScheme"
        )
        assert dark == scheme


@pytest.mark.parametrize("width", [320, 375])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(width, explorer, browser, tmp_path):
    with opened(browser, tmp_path, explorer, width=width) as page:
        slider(page, "heads").focus()
        page.keyboard.press("End")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for part in page.locator(
            ".bound-explorer :is(input, p, b, .be-row, fieldset, button)"
        ).all():
            box = part.bounding_box()
            if box is not None:
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
        # The bars stay in sight above the slider that is being moved.
        slider(page, "length").scroll_into_view_if_needed()
        slider(page, "length").focus()
        bars, moved = (
            page.locator(".be-chart").bounding_box(),
            slider(page, "length").bounding_box(),
        )
        assert 0 <= bars["y"] < moved["y"] < 812
