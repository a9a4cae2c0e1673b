"""Annotations on the viewer's page in a real browser: drawn, saved, and kept if they cannot be saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pathology.view.predictions import SLIDE_ID
from tests.workflows.commands.serving import serving
from tests.workflows.commands.viewing import SETTLED, address, at_of, browser, new_page, page, results

__all__ = ["address", "browser", "page", "results"]  # fixtures

LEAVING = """() => {
    const event = new Event('beforeunload', {cancelable: true});
    dispatchEvent(event);
    return event.defaultPrevented;
}"""
POINT = "at => viewer.annotations.add({type: 'Feature', properties: {}, geometry: {type: 'Point', coordinates: at}})"
SHOWN = "key => viewer.active.about.key === key && viewer.annotations.key === key"


def show(page: Any, key: str) -> None:
    page.evaluate("key => { viewer.active.show(key); }", key)
    page.wait_for_function(SHOWN, arg=key)


def points_of(path: Path) -> list[Any]:
    """Return the points that are saved; those of a missing file are none."""
    return [one["geometry"]["coordinates"] for one in json.loads(path.read_text())["features"]] if path.exists() else []


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


def test_leaving_warns_while_annotations_are_being_saved_and_later_changes_follow(page: Any, results: Path) -> None:
    held: list[Any] = []
    page.route("**/annotations.json", lambda route: hold_first_save(route, held))
    assert not page.evaluate(LEAVING)
    with page.expect_request(lambda request: request.method == "PUT"):
        page.evaluate(POINT, [9, 9])
        assert page.evaluate(LEAVING)
    show(page, "other")  # does not wait for the answer
    assert page.evaluate(LEAVING)
    assert not page.inner_text("#saving").startswith("Sav")  # which would be of another slide
    show(page, SLIDE_ID)
    page.evaluate(POINT, [7, 7])
    held[0].continue_()
    page.wait_for_function("() => !viewer.annotations.unsaved")
    path = results / "annotations" / f"{SLIDE_ID}.geojson"
    assert page.inner_text("#saving") == f"Saved in {path}"
    assert not page.evaluate(LEAVING)
    assert points_of(path) == [[9, 9], [7, 7]]
    path.unlink()


def hold_first_save(route: Any, held: list[Any]) -> None:
    if route.request.method == "PUT" and not held:
        held.append(route)
    else:
        route.continue_()


@pytest.mark.parametrize("arrives", [False, True])
def test_annotations_that_were_not_saved_are_kept_over_other_slides_and_saved_later(
    arrives: bool, page: Any, results: Path
) -> None:
    path = results / "annotations" / f"{SLIDE_ID}.geojson"
    page.evaluate(
        "() => { window.setTimeout = ((later) => (what, ms) => later(what, ms === 5000 ? 200 : ms))(setTimeout); }"
    )

    def answer(route: Any) -> None:
        """Answer instead of the server, as a proxy may do, or lose its answer, which has the version."""
        if route.request.method == "PUT":
            if arrives:
                route.fetch()
            route.fulfill(status=200, body="{}")
        else:
            route.continue_()

    page.route("**/annotations.json", answer)
    page.evaluate(POINT, [9, 9])
    page.wait_for_function("() => document.getElementById('saving').textContent.startsWith('Not saved')")
    page.evaluate(POINT, [7, 7])
    show(page, "other")
    assert page.evaluate(LEAVING)
    assert page.inner_text("#unsaved button") == SLIDE_ID
    page.click("#unsaved button")
    page.wait_for_function(SHOWN, arg=SLIDE_ID)
    assert page.inner_text("#saving").startswith("Not saved") and page.locator("#annotations li").count() == 2
    assert page.locator("#unsaved button").count() == 0
    show(page, "other")
    page.unroute_all(behavior="wait")  # on a busy machine an answer may be under way
    page.wait_for_function("() => !viewer.annotations.unsaved")
    assert points_of(path) == [[9, 9], [7, 7]]
    assert page.inner_text("#unsaved") == "" and not page.evaluate(LEAVING)
    path.unlink()


def test_annotations_without_a_file_are_kept_and_leaving_warns_of_them(browser: Any, results: Path) -> None:
    with serving(results.parent / "other.tiff", results.parent / f"{SLIDE_ID}.tiff") as (server, address):
        page = new_page(browser)
        page.goto(f"{address}view?slide={SLIDE_ID}")
        page.wait_for_function(SETTLED)
        assert "--annotations" in page.inner_text("#saving") and not page.evaluate(LEAVING)
        page.evaluate(POINT, [9, 9])
        show(page, "other")
        assert page.evaluate(LEAVING) and page.inner_text("#unsaved button") == SLIDE_ID
        show(page, SLIDE_ID)
        assert page.locator("#annotations li").count() == 1
        server.terminate()
        server.wait()
        with page.expect_download() as downloaded:
            page.click("#download")
        assert points_of(downloaded.value.path()) == [[9, 9]]
        page.close(run_before_unload=False)


def test_a_download_has_the_positions_of_qupath(browser: Any, results: Path) -> None:
    with serving(results.parent / "store") as (_, address):
        page = new_page(browser)
        page.goto(f"{address}view?slide={SLIDE_ID}")
        page.wait_for_function(SETTLED)
        page.evaluate(POINT, [200, 150])
        ring = [[0, 0], [10, 0], [10.5, 5.25], [0, 0]]
        polygon = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [ring]}}
        page.evaluate("one => viewer.annotations.add(one)", polygon)
        with page.expect_download() as downloaded:
            page.click("#download")
        assert downloaded.value.suggested_filename == f"{SLIDE_ID}.geojson"
        assert points_of(downloaded.value.path()) == [[400, 300], [[[0, 0], [20, 0], [21, 10.5], [0, 0]]]]
        page.close(run_before_unload=False)


def test_a_file_that_somebody_else_changed_is_left_and_the_own_annotations_are_kept(
    browser: Any, address: str, results: Path
) -> None:
    page = new_page(browser)
    page.goto(f"{address}view?slide={SLIDE_ID}")
    page.wait_for_function(SETTLED)
    page.evaluate(POINT, [9, 9])
    page.wait_for_function("() => !viewer.annotations.unsaved")
    path = results / "annotations" / f"{SLIDE_ID}.geojson"
    theirs = '{"type": "FeatureCollection", "features": []}'
    path.write_text(theirs)
    page.evaluate(POINT, [7, 7])
    page.wait_for_function("() => document.getElementById('saving').textContent.includes('Download keeps them')")
    show(page, "other")
    show(page, SLIDE_ID)
    assert page.locator("#annotations li").count() == 2 and page.evaluate(LEAVING)
    assert path.read_text() == theirs
    path.unlink()
    page.close()
