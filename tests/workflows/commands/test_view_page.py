"""The viewer's page in a real browser: zoom, pan, layers, regions, annotations, side by side, a hundred fast jumps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pathology.tiffs import stained, write_slide
from tests.pathology.view.predictions import SLIDE_ID, make_predictions
from tests.patience import PATIENCE_S
from tests.workflows.commands.serving import serving
from tests.workflows.evaluation.test_cohort_page import READOUT, TASK, slide_of
from workflows.evaluation.cohort_page import write_cohort_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SETTLED = """() => {
    const images = [...document.querySelectorAll('.leaflet-tile-container img')];
    const there = images.length > 0 && images.every(one => one.complete && one.naturalWidth > 0);
    const pane = viewer.active;
    const drawable = viewer.annotations.collection && viewer.annotations.key === pane?.key;
    return there && drawable && pane.map && pane.key === pane.wanted && !pane.map._animatingZoom;
}"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicted")
    write_slide(folder / "other.tiff", stained(900, 1400), mpp=0.25, levels=2)
    return make_predictions(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(results: Path) -> Iterator[str]:
    with serving(results, results.parent / "other.tiff") as (_, found):
        yield found


def new_page(browser: Any, width: int = 1280, height: int = 720) -> Any:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(1000 * PATIENCE_S)
    return page


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page on the predicted slide; whatever it says on its console, or fails to load, fails the test."""
    page = new_page(browser, width=1200, height=800)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda answer: answer.status >= 400 and said.append(f"{answer.status} {answer.url}"))
    page.goto(f"{address}view?slide={SLIDE_ID}")
    page.wait_for_function(SETTLED)
    yield page
    assert said == []
    page.close()


def view_of(page: Any) -> dict[str, float]:
    found: dict[str, float] = page.evaluate("() => viewer.active.view")
    return found


def at_of(page: Any, x: float, y: float) -> tuple[float, float]:
    """Return where a pixel of the slide is on the screen."""
    found = page.evaluate(
        "([x, y]) => { const at = viewer.active.map.latLngToContainerPoint([y, x]), box = viewer.active.mapHolder"
        ".getBoundingClientRect(); return [at.x + box.x, at.y + box.y]; }",
        [x, y],
    )
    return found[0], found[1]


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


def test_annotations_are_drawn_saved_and_there_again(page: Any, results: Path) -> None:
    path = results / "annotations" / f"{SLIDE_ID}.geojson"
    page.keyboard.press("0")
    page.wait_for_function(SETTLED)
    page.fill("#class", "Stroma")
    page.click("[data-tool=polygon]")
    corners = [(200, 200), (400, 220), (380, 500)]
    for x, y in corners:
        page.mouse.click(*at_of(page, x, y))
    page.keyboard.press("Enter")
    page.click("[data-tool=rectangle]")
    page.mouse.move(*at_of(page, 1450, 300))
    page.mouse.down()
    page.mouse.move(*at_of(page, 1600, 450), steps=4)
    page.mouse.up()
    page.click("[data-tool=freehand]")
    page.mouse.move(*at_of(page, 800, 300))
    page.mouse.down()
    for x, y in ((900, 300), (900, 500), (800, 500)):
        page.mouse.move(*at_of(page, x, y), steps=3)
    page.mouse.up()
    page.wait_for_function("() => document.getElementById('saving').textContent.startsWith('Saved in')")
    page.wait_for_function("() => viewer.annotations.collection.features.length === 3 && !viewer.annotations.unsaved")
    written = json.loads(path.read_text())["features"]
    assert [one["geometry"]["type"] for one in written] == ["Polygon"] * 3
    ring = written[0]["geometry"]["coordinates"][0]
    assert ring[0] == ring[-1] and len(ring) == 4
    for found, drawn in zip(ring, corners, strict=False):
        assert found == pytest.approx(list(drawn), abs=4)  # a pixel of the screen is about 2.5 of the slide's
    assert written[0]["properties"]["classification"]["name"] == "Stroma"
    assert written[0]["properties"]["objectType"] == "annotation"
    page.reload()
    page.wait_for_function(SETTLED)
    page.wait_for_function("() => document.querySelectorAll('#annotations li').length === 3")
    page.click("#annotations .pick >> nth=1")
    page.keyboard.press("Delete")
    page.wait_for_function("() => document.getElementById('saving').textContent.startsWith('Saved in')")
    assert [one["id"] for one in json.loads(path.read_text())["features"]] == [written[0]["id"], written[2]["id"]]
    path.unlink()


def test_tools_wait_for_the_annotations_of_the_slide(page: Any) -> None:
    held: list[Any] = []
    page.route("**/annotations.json", lambda route: held.append(route))
    page.evaluate("() => viewer.active.show('other')")
    page.wait_for_function("() => viewer.active.about.key === 'other' && !viewer.annotations.collection")
    disabled = "() => [...document.getElementById('tools').children].map(button => button.disabled)"
    assert set(page.evaluate(disabled)) == {True}
    held[0].continue_()
    page.wait_for_function(SETTLED)
    assert set(page.evaluate(disabled)) == {False}


def test_leaving_warns_while_annotations_are_being_saved_and_the_message_has_their_own_file(
    page: Any, results: Path
) -> None:
    held: list[Any] = []
    saves: list[str] = []

    def answer(route: Any) -> None:
        """Hold the first request that saves; let all others pass."""
        if route.request.method == "PUT":
            saves.append(route.request.url)
        if route.request.method == "PUT" and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/annotations.json", answer)
    leaving = """() => {
        const event = new Event('beforeunload', {cancelable: true});
        dispatchEvent(event);
        return event.defaultPrevented;
    }"""
    assert not page.evaluate(leaving)
    with page.expect_request(lambda request: request.method == "PUT"):
        page.evaluate("() => viewer.annotations.add({type: 'Feature', geometry: {type: 'Point', coordinates: [9, 9]}})")
        assert page.evaluate(leaving)
    assert page.evaluate("() => viewer.annotations.timer") == 0
    assert page.evaluate(leaving)
    page.evaluate("() => viewer.active.show('other')")
    page.wait_for_function("() => viewer.active.about.key === 'other'")
    other = page.evaluate("() => viewer.active.about.annotations.path")
    page.evaluate("() => viewer.annotations.drop(viewer.annotations.collection.features[0])")
    page.evaluate(
        """() => {
            window.said = [];
            const say = viewer.annotations.say.bind(viewer.annotations);
            viewer.annotations.say = (text, bad) => { said.push(text); say(text, bad); };
        }"""
    )
    held[0].continue_()
    page.wait_for_function("() => said.length > 0")
    path = results / "annotations" / f"{SLIDE_ID}.geojson"
    assert page.evaluate("() => said[0]") == f"Saved in {path}" != f"Saved in {other}"
    page.wait_for_function("() => !viewer.annotations.unsaved && viewer.annotations.key === 'other'")
    assert not page.evaluate(leaving)
    assert len(saves) == 2 and saves[0] == saves[1]
    assert json.loads(path.read_text())["features"] == []
    path.unlink()


def test_leaving_warns_of_annotations_that_could_not_be_saved(page: Any, results: Path) -> None:
    leaving = """() => {
        const event = new Event('beforeunload', {cancelable: true});
        dispatchEvent(event);
        return event.defaultPrevented;
    }"""
    point = "() => viewer.annotations.add({type: 'Feature', geometry: {type: 'Point', coordinates: [9, 9]}})"

    def answer(route: Any) -> None:
        """Answer instead of the server, as a proxy may do, without the version that was saved."""
        if route.request.method == "PUT":
            route.fulfill(status=200, body="{}")
        else:
            route.continue_()

    page.route("**/annotations.json", answer)
    page.evaluate(point)
    page.wait_for_function("() => document.getElementById('saving').textContent.startsWith('Not saved')")
    assert not page.evaluate("() => viewer.annotations.unsaved")
    assert page.evaluate(leaving)
    page.unroute("**/annotations.json")
    page.evaluate(point)
    page.wait_for_function("() => document.getElementById('saving').textContent.startsWith('Saved in')")
    assert not page.evaluate(leaving)
    path = results / "annotations" / f"{page.evaluate('() => viewer.active.about.key')}.geojson"
    assert len(json.loads(path.read_text())["features"]) == 2
    path.unlink()


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


def test_a_hundred_fast_jumps_end_where_they_should(page: Any) -> None:
    page.evaluate(
        """async () => {
            for (let k = 0; k < 100; k++) {
                viewer.active.map.setView([(k * 377) % 1000, (k * 733) % 2000], (k * 7) % 5, {animate: false});
                await new Promise(done => setTimeout(done, 10));
            }
        }"""
    )
    page.wait_for_function(SETTLED)
    view = view_of(page)
    assert (round(view["y"]), round(view["x"]), view["zoom"]) == (99 * 377 % 1000, 99 * 733 % 2000, 99 * 7 % 5)
    for key in "jkjkjk":
        page.keyboard.press(key)
    page.wait_for_function(SETTLED)
    assert page.evaluate("() => viewer.active.about.key") == SLIDE_ID
