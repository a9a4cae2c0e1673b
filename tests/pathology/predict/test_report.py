from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from pathology.pages import data_uri
from pathology.predict.report import (
    RegionPicture,
    Report,
    ReportBar,
    area_text,
    flags_of,
    percent,
    render_report,
    signed,
)

PICTURE = data_uri(Image.new("RGB", (64, 48), (200, 120, 160)), 32)


def report_of() -> Report:
    return Report(
        slide_id='S-1 <script>alert("x")</script>',
        case_id="C-7",
        prediction="malignant & rare",
        verdict="96.8 %",
        channel="malignant & rare",
        withheld="",
        partial=False,
        coverage=1.0,
        first=1,
        bars=[
            ReportBar("benign", 0.0321, "3.2 %", "1.0", "rgb(1, 2, 3)"),
            ReportBar("malignant & rare", 0.9679, "96.8 %", "1.0", "rgb(9, 8, 7)"),
        ],
        exclusive=True,
        note="Mean of two.",
        facts=[("tissue seen", "93.1 %")],
        flags=flags_of(["mpp_assumed", "some_new_flag"]),
        thumbnail=PICTURE,
        overlay=PICTURE,
        wide=False,
        logit=2.5,
        bias=-0.125,
        off_tissue=0.125,
        square="32 × 32 µm",
        regions=[RegionPicture(1, PICTURE, 0.25, "43.0 %", "0.2 mm²", 120, 340)],
        regions_left_out="Neither listed nor outlined: 3 regions of lower score.",
        crop="256 µm",
        provenance=[("Checkpoint", [("digest", "ab" * 32)])],
        made_at="1 May 2026",
        version="0.1.0",
    )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(report: Report) -> _Links:
    links = _Links()
    links.feed(render_report(report))
    return links


def test_page_needs_nothing_but_itself() -> None:
    page = render_report(report_of())
    links = parsed(report_of())
    assert len(links.addresses) == 3
    assert all(address.startswith("data:image/jpeg;base64,") for address in links.addresses)
    assert not re.search(r"https?://|url\(|@import|<link|<script", page)


def test_every_text_is_escaped() -> None:
    links = parsed(report_of())
    assert "script" not in links.tags
    assert 'S-1 <script>alert("x")</script>' in "".join(links.text)


def test_page_says_what_a_reader_must_know() -> None:
    text = " ".join("".join(parsed(report_of()).text).split())
    for part in (
        "For research use only",
        "malignant & rare, 96.8 %",
        "3.2 % ± 1.0",
        "mpp_assumed: the file does not state",
        "some_new_flag",
        "93.1 %",
        "+2.500",
        "-0.125",
        "12.5 % of the positive contribution is outside of the tissue",
        "score 25.0 %",
        "x 120, y 340",
        "0.2 mm² 43.0 % of the evidence",
        "Neither listed nor outlined: 3 regions of lower score.",
        "ab" * 32,
        "Case C-7",
    ):
        assert part in text


def test_single_model_has_no_spread_and_a_page_without_regions_has_no_empty_section() -> None:
    single = replace(
        report_of(),
        bars=[ReportBar("a", 0.4, "40.0 %", "", "red"), ReportBar("b", 0.6, "60.0 %", "", "blue")],
        regions=[],
        regions_left_out="",
    )
    text = "".join(parsed(single).text)
    assert "±" not in text
    assert "Regions that score" not in text
    faint = replace(single, regions_left_out="Neither listed nor outlined: 400 regions.")
    assert "Neither listed nor outlined: 400 regions." in "".join(parsed(faint).text)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0 %"), (0.00001, "< 0.1 %"), (0.5, "50.0 %"), (0.99999, "> 99.9 %"), (1.0, "100.0 %")],
)
def test_percent_never_rounds_to_certainty(share: float, text: str) -> None:
    assert percent(share) == text


def test_numbers_have_a_sign_unless_they_are_nothing() -> None:
    assert [signed(value) for value in (-0.0004, 0.0, 2.5, -1.0)] == ["+0.000", "+0.000", "+2.500", "-1.000"]


def test_areas_and_pictures() -> None:
    assert area_text(1024.0) == "1024 µm²"
    assert area_text(2.5e6) == "2.5 mm²"
    small = data_uri(Image.new("RGB", (400, 100)), 50)
    assert small.startswith("data:image/jpeg;base64,")


def test_no_class_is_named_where_it_is_withheld_and_a_partial_one_is_marked() -> None:
    withheld = replace(report_of(), withheld="only 2.0 % of the tissue was seen", coverage=0.02)
    text = "".join(parsed(withheld).text)
    assert "Incomplete: no prediction" in text and "Only 2.0 % of the tissue was seen" in text
    assert "96.8 %" not in text and "benign" not in text
    partial = "".join(parsed(replace(report_of(), partial=True, coverage=0.02)).text)
    assert "From 2.0 % of the tissue only" in partial and "96.8 %" in partial
