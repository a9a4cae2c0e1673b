"""The viewer's page in a real browser, for tests: a predicted slide and another one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pathology.tiffs import stained, write_slide
from tests.pathology.view.predictions import SLIDE_ID, make_predictions
from tests.patience import PATIENCE_S
from tests.workflows.commands.serving import serving

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


def at_of(page: Any, x: float, y: float) -> tuple[float, float]:
    """Return where a pixel of the slide is on the screen."""
    found = page.evaluate(
        "([x, y]) => { const at = viewer.active.map.latLngToContainerPoint([y, x]), box = viewer.active.mapHolder"
        ".getBoundingClientRect(); return [at.x + box.x, at.y + box.y]; }",
        [x, y],
    )
    return found[0], found[1]
