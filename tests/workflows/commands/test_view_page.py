"""The viewer's page in a real browser: zoom, pan, layers, regions, side by side, a hundred fast jumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pathology.view.web_files import with_viewer
from tests.pathology.view.predictions import SLIDE_ID
from tests.workflows.commands.viewing import SETTLED, address, at_of, browser, new_page, page, results
from tests.workflows.evaluation.test_cohort_page import READOUT, TASK, slide_of
from workflows.evaluation.cohort_page import write_cohort_page

__all__ = ["address", "browser", "page", "results"]  # fixtures


def view_of(page: Any) -> dict[str, float]:
    found: dict[str, float] = page.evaluate("() => viewer.active.view")
    return found


def test_the_table_opens_the_slide_with_its_heatmap(browser: Any, address: str) -> None:
    page = new_page(browser)
    page.goto(address)
    assert page.url.endswith("/cohort/0/")
    page.click(".space .row a")
    page.wait_for_url(f"**/view?slide={SLIDE_ID}*")
    page.wait_for_function(SETTLED)
    assert page.inner_text("#name") == SLIDE_ID
    page.wait_for_selector('img[src*="/layer/1/"]', state="attached")
    assert page.is_checked('[data-layer="score dark"]') and not page.is_checked('[data-layer="score pale"]')
    page.close()


def test_the_table_sorts_and_slides_without_a_value_come_last(browser: Any, tmp_path: Path) -> None:
    slides = [slide_of("a", 0.3), slide_of("b", 0.0, status="failed", prediction="", values=(), coverage=None)]
    flagged = {"flags": ("outside_training", "cropped"), "reason": "only a part; outside_training: 18 times the area"}
    slides += [slide_of("c", 0.9, **flagged), slide_of("d", 0.1)]
    page = new_page(browser)
    page.goto(write_cohort_page(tmp_path, slides, TASK, READOUT, "Cohort").as_uri())
    flags = page.locator(".space .row").nth(2).locator("> div").last.inner_text().split()
    assert " ".join(flags) == "outside_training cropped only a part; 18 times the area"

    def order() -> list[str]:
        return [text.split()[0] for text in page.locator(".space .row").all_inner_texts()]

    assert order() == ["a", "b", "c", "d"]
    for column, down, up in (("malignant", "cadb", "dacb"), ("tissue seen", "acdb", "acdb")):
        for expected in (down, up):
            page.click(f"button:has-text('{column}')")
            assert order() == list(expected)
    page.close()


def test_the_table_links_slides_whose_names_are_not_utf_8(browser: Any, tmp_path: Path) -> None:
    slides = [slide_of("a", 0.3), slide_of("M\udcfcller & co", 0.4, link="M%FCller%20%26%20co/report.html")]
    written = write_cohort_page(tmp_path, slides, TASK, READOUT, "Cohort")
    page = new_page(browser)
    page.goto(written.as_uri())
    links = "() => [...document.querySelectorAll('.space .row a')].map(one => one.getAttribute('href'))"
    assert page.evaluate(links) == ["M%FCller%20%26%20co/report.html"]
    written.write_text(with_viewer(written.read_text(), "../../open/0/"))
    page.reload()
    name = "M%5Cudcfcller%20%26%20co"
    assert page.evaluate(links) == ["../../open/0/a", f"../../open/0/{name}", f"{name}/report.html"]
    page.close()


def test_the_table_of_slides_is_as_high_as_its_rows_up_to_a_part_of_the_window(browser: Any, tmp_path: Path) -> None:
    page = new_page(browser, width=1400, height=800)
    slides = [slide_of(f"{kind}{k}", 0.3) for kind, count in (("a", 3), ("b", 41)) for k in range(count)]
    page.goto(write_cohort_page(tmp_path, slides, TASK, READOUT, "Cohort").as_uri())

    def heights() -> tuple[float, int]:
        below = "() => document.querySelector('#grid').clientHeight - document.querySelector('#head').offsetHeight"
        return page.evaluate(below), page.locator(".space .row").count()

    height, rows = heights()
    assert 400 < height <= 0.7 * 800 and 60 * rows > height  # of 44, as many as fit are drawn
    for text, count in (("case of a", 3), ("nothing", 0)):
        page.fill("#search", text)
        assert heights() == (60 * count, count)
    page.fill("#search", "")
    assert heights() == (height, rows)
    page.evaluate("() => { document.querySelector('#grid').scrollTop = 60 * 44 }")
    page.locator(".space .row", has_text="b40").wait_for()
    page.close()


def test_magnification_is_true_to_the_slides_micrometres(page: Any) -> None:
    for key, power in (("1", 2.5), ("3", 10.0), ("5", 40.0)):
        page.keyboard.press(key)
        page.wait_for_function(SETTLED)
        (x0, y0), (x1, y1) = at_of(page, 900, 400), at_of(page, 1100, 500)
        um = 10 / power  # under a pixel of the screen; the slide's are 0.5 µm
        assert (x1 - x0) * um == pytest.approx(200 * 0.5, abs=2 * um)
        assert (y1 - y0) * um == pytest.approx(100 * 0.5, abs=2 * um)
        bar = page.evaluate("() => document.querySelector('.scale i').style.width")
        number, unit = page.inner_text(".scale").split()
        assert float(number) * {"µm": 1, "mm": 1000}[unit] == pytest.approx(float(bar[:-2]) * um, rel=0.01)
        assert page.inner_text("#powers [aria-pressed=true]").startswith(f"{power:g}")
    page.keyboard.press("6")
    page.wait_for_function(SETTLED)
    assert "/tile/3/" in page.evaluate("() => document.querySelector('.slide img').src")
    assert page.evaluate("() => [...document.querySelectorAll('.slide img')].every(one => one.src.endsWith('.png'))")


def test_wheel_and_drag_move_the_slide_under_the_pointer(page: Any) -> None:
    page.keyboard.press("3")
    page.wait_for_function(SETTLED)
    before = view_of(page)
    page.mouse.move(600, 400)
    page.mouse.down()
    page.mouse.move(500, 380, steps=5)
    page.wait_for_timeout(150)  # held still: the slide does not glide on
    page.mouse.up()
    moved = view_of(page)
    assert moved["x"] - before["x"] == pytest.approx(200, abs=30)  # 100 px at 1 µm, of pixels of 0.5 µm
    assert moved["y"] - before["y"] == pytest.approx(40, abs=30)
    page.mouse.wheel(0, -300)
    page.wait_for_function("zoom => viewer.active.view.zoom > zoom + 0.5", arg=moved["zoom"])
    page.keyboard.press("0")  # perhaps while the wheel's zoom is under way
    page.wait_for_function("zoom => viewer.active.view.zoom < zoom", arg=moved["zoom"])
    page.wait_for_function(SETTLED)
    assert (view_of(page)["x"], view_of(page)["y"]) == pytest.approx((1000, 500), abs=2)


def test_layers_are_put_on_faded_and_taken_off(page: Any) -> None:
    page.uncheck('[data-layer="score dark"]')
    assert page.query_selector('img[src*="/layer/"]') is None
    page.check('[data-layer="score pale"]')
    page.check('[data-layer="contribution dark"]')
    page.check('[data-layer="tissue"]')
    page.wait_for_function(SETTLED)
    for layer in ("0", "3", "tissue"):
        assert page.query_selector(f'img[src*="/layer/{layer}/"]') is not None
    slider = page.locator(".layer", has=page.locator('[data-layer="score pale"]')).locator("input[type=range]")
    slider.fill("0.25")
    assert page.evaluate("() => viewer.active.layers.get('0').getContainer().style.opacity") == "0.25"
    page.uncheck("#smooth")
    page.wait_for_function(SETTLED)
    assert page.evaluate(
        "() => [...document.querySelectorAll('img[src*=\"/layer/\"]')].every(i => !i.src.includes('smooth'))"
    )
    page.keyboard.press("t")
    assert page.query_selector('img[src*="/layer/tissue/"]') is None


def test_a_region_of_the_list_is_flown_to(page: Any) -> None:
    ring = page.evaluate("() => viewer.active.regions[0].geometry.coordinates[0]")
    middle = [(min(p[k] for p in ring) + max(p[k] for p in ring)) / 2 for k in (0, 1)]
    page.click("#regions button >> nth=0")
    page.wait_for_function("([x, y]) => Math.hypot(viewer.active.view.x - x, viewer.active.view.y - y) < 8", arg=middle)
    page.keyboard.press("n")
    assert page.get_attribute("#regions button >> nth=1", "aria-current") == "true"


def test_slides_side_by_side_move_together(page: Any) -> None:
    page.keyboard.press("s")
    page.wait_for_function(
        "() => viewer.panes.length === 2 && viewer.panes[1].map && viewer.active === viewer.panes[1]"
    )
    page.wait_for_function(SETTLED)
    assert page.evaluate("() => viewer.panes.map(pane => pane.key)") == [SLIDE_ID, "other"]
    states = "() => viewer.panes.map(pane => [pane.view.x * pane.unit, pane.view.y * pane.unit, pane.perPixel])"
    page.evaluate("() => viewer.panes[0].map.setView([500, 1000], 2, {animate: false})")
    before = page.evaluate(states)
    page.evaluate("() => viewer.panes[0].map.setView([420, 1160], 3, {animate: false})")
    after = page.evaluate(states)
    for old, new in zip(before, after, strict=True):
        assert [new[0] - old[0], new[1] - old[1]] == pytest.approx([80, -40], abs=0.5)  # µm
        assert old[2] / new[2] == pytest.approx(2)
    assert after[0][2] == pytest.approx(after[1][2])  # 0.5 and 0.25 µm under a pixel: the same on the screen
    page.wait_for_function(SETTLED)
    page.keyboard.press("x")
    assert page.evaluate("() => viewer.panes.length") == 1


def test_fast_jumps_end_where_they_should(page: Any) -> None:
    page.evaluate(
        """async () => {
            for (let k = 0; k < 40; k++) {
                viewer.active.map.setView([(k * 377) % 1000, (k * 733) % 2000], (k * 7) % 5, {animate: false});
                await new Promise(done => setTimeout(done, 10));
            }
        }"""
    )
    page.wait_for_function(SETTLED)
    view = view_of(page)
    assert (round(view["y"]), round(view["x"]), view["zoom"]) == (39 * 377 % 1000, 39 * 733 % 2000, 39 * 7 % 5)
    for key in "jkjkjk":
        page.keyboard.press(key)
    page.wait_for_function(SETTLED)
    assert page.evaluate("() => viewer.active.about.key") == SLIDE_ID
