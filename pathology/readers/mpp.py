"""Microns per pixel: parsed, checked for plausibility, and taken from the user if the file does not state them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pathology.errors import SlideError

SENSIBLE_UM = (0.05, 20.0)
SQUARE_TOLERANCE = 0.05
AGREE_TOLERANCE = 0.05
_UM_PER_UNIT = {"inch": 25_400.0, "centimeter": 10_000.0, "millimeter": 1_000.0, "micrometer": 1.0}

UM_TIMES_POWER = 10.0
"""Microns per pixel times magnification of a usual scanner: 0.25 µm at 40×, 0.5 µm at 20×."""
_POWERS = (0.5, 100.0)

HOW_TO_GIVE = "give it in the column `source_mpp` of a manifest CSV, or for all such slides with --slide-mpp"


@dataclass(frozen=True, slots=True)
class SourceMpp:
    """Microns per pixel (y, x) of a source's finest level.

    Attributes:
        um: The value.
        origin: ``file``, ``manifest``, ``flag`` or ``magnification``.
    """

    um: tuple[float, float]
    origin: str


def parse_number(text: str) -> float:
    """Parse a number with a decimal point or comma; with a comma, points may separate thousands: ``1.000,5``.

    Raises:
        ValueError: The text is not a finite number.
    """
    # Points separate thousands only if there is a comma: "1.000" is 1.
    digits, comma, part = text.strip().rpartition(",")
    points = comma and re.fullmatch(r"\d{1,3}(\.\d{3})+", digits)
    value = float(f"{digits.replace('.', '')}.{part}" if points else text.strip().replace(",", "."))
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def mpp_of_resolution(pixels_per_unit: float, unit: str) -> float | None:
    """Return microns per pixel of a TIFF resolution tag: None for an unknown unit, 0 for a resolution of 0 or less."""
    if unit not in _UM_PER_UNIT:
        return None
    return _UM_PER_UNIT[unit] / pixels_per_unit if pixels_per_unit > 0 else 0.0


def is_sensible(mpp: tuple[float, float] | None) -> bool:
    """Whether both axes lie in 0.05–20 µm and within 5 % of each other."""
    if mpp is None or not all(SENSIBLE_UM[0] <= v <= SENSIBLE_UM[1] for v in mpp):
        return False
    return max(mpp) <= (1 + SQUARE_TOLERANCE) * min(mpp)


def agree(a_um: tuple[float, float], b_um: tuple[float, float]) -> bool:
    """Whether two statements (y, x) differ by at most 5 % in both directions."""
    return all(abs(a - b) <= AGREE_TOLERANCE * min(a, b) for a, b in zip(a_um, b_um, strict=True))


def mpp_text(mpp: list[float] | tuple[float, float] | None) -> str:
    """Return (y, x) microns per pixel as text."""
    if mpp is None:
        return "µm/px not stated"
    y, x = mpp
    return f"{x:.4g} µm/px" if abs(x - y) < 1e-6 * x else f"{y:.4g} × {x:.4g} µm/px (y, x)"


def resolve_mpp(
    file_mpp: tuple[float, float] | None,
    manifest_mpp: str,
    flag_mpp: float | None,
    force: bool = False,
    *,
    doubt: str = "",
    power: float | None = None,
    objective: str = "",
    from_magnification: bool = False,
) -> SourceMpp:
    """Choose a slide's microns per pixel: those of the file, else of the manifest, the flag, the magnification.

    Args:
        file_mpp: (y, x) that the file states; None if it states none.
        manifest_mpp: The cell ``source_mpp`` of the slide's manifest row; may be empty.
        flag_mpp: ``--slide-mpp``: used if neither file nor manifest states a plausible value.
        force: ``--force-mpp``: manifest and flag take precedence over the file.
        doubt: Why no value of the file is believed; empty if one is, or the file has none.
        power: Magnification that the file states; None if it does not.
        objective: The cell ``objective`` of the manifest row, as in ``20x``; may be empty.
        from_magnification: ``--mpp-from-magnification``: if nothing else is known, take the usual value of the
            magnification.

    Raises:
        SlideError: No plausible value is known, or file and manifest differ by more than 5 %.
    """
    stated = _manifest_value(manifest_mpp)
    if file_mpp is not None and is_sensible(file_mpp) and not (force and (stated or flag_mpp)):
        mean = sum(file_mpp) / 2
        if stated is not None and abs(stated - mean) > AGREE_TOLERANCE * mean:
            raise SlideError(
                f"the file says {mean:.4g} µm/px, the column source_mpp {stated:.4g}: they differ by more than 5 %; "
                f"correct or empty the cell, or use --force-mpp if the file is wrong"
            )
        return SourceMpp(file_mpp, "file")
    if stated is not None:
        return SourceMpp((stated, stated), "manifest")
    if flag_mpp is not None:
        return SourceMpp((flag_mpp, flag_mpp), "flag")
    problem = doubt or _what_the_file_says(file_mpp)
    magnification = _magnification(power, objective)
    if magnification is None:
        raise SlideError(f"{problem}; {HOW_TO_GIVE}")
    # Only on request, because it is a usual value, not that of this scanner.
    usual = UM_TIMES_POWER / magnification
    if from_magnification:
        return SourceMpp((usual, usual), "magnification")
    raise SlideError(
        f"{problem}; {magnification:g}× usually has {usual:.3g} µm/px: take that with --mpp-from-magnification, or "
        f"{HOW_TO_GIVE}"
    )


def _magnification(power: float | None, objective: str) -> float | None:
    """Return the magnification of the file, else of the manifest.

    Raises:
        SlideError: They differ, or the manifest's cell is not a magnification.
    """
    if not objective.strip():
        stated = None
    else:
        match = re.fullmatch(r"\s*(\d+(?:[.,]\d+)?)\s*[x×X]?\s*", objective)
        stated = parse_number(match[1]) if match else 0.0
        if not _POWERS[0] <= stated <= _POWERS[1]:
            raise SlideError(f"the column objective is {objective!r}; expected a magnification such as 20 or 40x")
    if power and stated and power != stated:
        raise SlideError(
            f"the file states a magnification of {power:g}×, the column objective {stated:g}×; correct or empty the "
            f"cell, or {HOW_TO_GIVE}"
        )
    return stated or (power if power and _POWERS[0] <= power <= _POWERS[1] else None)


def not_used_note(flag_mpp: float | None, used: Mapping[str, float | None]) -> str:
    """Return a note about slides whose own plausible mpp contradicts ``--slide-mpp``; empty if there are none.

    Args:
        flag_mpp: ``--slide-mpp``, given without ``--force-mpp``.
        used: Slide -> its microns per pixel; None: unknown.
    """
    if flag_mpp is None:
        return ""
    contradicting = [(name, um) for name, um in used.items() if um and abs(um / flag_mpp - 1) > AGREE_TOLERANCE]
    if not contradicting:
        return ""
    name, um = contradicting[0]
    slides = f"{len(contradicting)} slide{'s' * (len(contradicting) > 1)}"
    return (
        f"note: --slide-mpp {flag_mpp:g} was not used for {slides}, as file or manifest state another value "
        f"({name}: {um:.4g}); --force-mpp overrides the file's"
    )


def _manifest_value(text: str) -> float | None:
    """Return the cell ``source_mpp`` of a manifest as a number; None if it is empty."""
    if not text.strip():
        return None
    try:
        value = parse_number(text)
    except ValueError as error:
        raise SlideError(f"the column source_mpp is {text!r}; expected a number of microns per pixel") from error
    if not is_sensible((value, value)):
        raise SlideError(f"the column source_mpp is {text!r}; expected {_range()}")
    return value


def _what_the_file_says(file_mpp: tuple[float, float] | None) -> str:
    """Return the part of a message that says which implausible mpp a file states, or that it states none."""
    if file_mpp is None:
        return "the file does not state its microns per pixel"
    y, x = file_mpp
    stated = f"{_number(x)} µm/px" if x == y else f"{_number(y)} × {_number(x)} µm/px (y, x)"
    if 0 in file_mpp:
        stated += ", or a resolution of 0"
    # If each is plausible alone, it is their ratio that is not.
    each_plausible = all(SENSIBLE_UM[0] <= v <= SENSIBLE_UM[1] for v in file_mpp)
    expected = "square within 5 %" if each_plausible else _range()
    return f"the file states {stated}, which is not plausible (expected {expected})"


def _number(um: float) -> str:
    return f"{um:.4g}" if um < 1000 else f"{um:.1f}"  # as it is in the file: 9999.9, not 1e+04


def _range() -> str:
    return f"{SENSIBLE_UM[0]:g} to {SENSIBLE_UM[1]:g} µm"
