"""The choice among a file's statements of microns per pixel, which are compared with each other and the magnification.

```
OME-XML 0.5, tags 0.5                  they agree                          0.5
OME-XML 0.5, tags 72 per inch          a default of many programs          0.5
Aperio 0.5, tags 0.25, 20×             magnification decides               0.5, noted
Aperio 0.5, tags 0.25                  nothing decides                     refused, with both
OME-XML 0.5 of 1024 px, page 256 px    reduced by 4, or cut?               refused, unless other statements decide
0.05                                   no scanner, if not 60× or more      refused
20×, 5.0                               a tenfold mistake                   refused
```
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pathology.readers.facts.slide_facts import APERIO, Note, SlideFacts, StatedMpp
from pathology.readers.mpp import UM_TIMES_POWER, agree, is_sensible, mpp_text

MPP_FLAG = "mpp_doubtful"
FINEST_UM = 0.12
"""No brightfield scanner with an objective below `_IMMERSION_POWER` has finer pixels."""
_IMMERSION_POWER = 60
_USUAL = (4.2, 17.0)
"""Range of microns per pixel times magnification among scanners, whose cameras and lenses differ."""
_POSSIBLE = (2.5, 50.0)
"""Outside of this range, a statement is wrong by a factor of about ten or more."""
_DECIDES = (6.0, 15.0)
"""Range in which magnification decides between two statements."""


@dataclass(frozen=True, slots=True)
class CheckedMpp:
    """The microns per pixel (y, x) that are believed, and the facts with doubts and notes.

    Attributes:
        um: The believed value. If no statement is plausible, the first one, for messages. None: there is no statement,
            or there is doubt.
        facts: The file's facts.
    """

    um: tuple[float, float] | None
    facts: SlideFacts


def checked_mpp(stated: tuple[StatedMpp, ...], power: float | None, size_px: tuple[int, int]) -> CheckedMpp:
    """Compare all statements of microns per pixel; return the believed value with notes and doubts.

    Args:
        stated: Statements of the file, that of the most trusted place first.
        power: Magnification of the objective; None if the file does not state it.
        size_px: (height, width) of the finest level.
    """
    facts = SlideFacts(
        stated, notes=tuple(Note(MPP_FLAG, statement.repaired) for statement in stated if statement.repaired)
    )
    plausible = [statement for statement in stated if is_sensible(statement.um)]
    fine = [statement for statement in plausible if _is_fine_for(statement, power)]
    if not plausible:
        return CheckedMpp(stated[0].um if stated else None, facts)
    if not fine:
        doubt = f"{_as_text(plausible[0])}, finer than any scanner at less than {_IMMERSION_POWER}×"
        return CheckedMpp(None, replace(facts, mpp_doubt=doubt))
    too_fine = [statement for statement in stated if 0 < max(statement.um) < FINEST_UM and statement not in fine]
    if too_fine:
        facts = facts.noting(Note(MPP_FLAG, f"{_as_text(fine[0])}; {_as_text(too_fine[0])}, which is not plausible"))
    return _against_power(_agreed(fine, power, size_px, facts), power)


def noted_if_contrary(checked: CheckedMpp, other: StatedMpp | None) -> CheckedMpp:
    """Return what is believed, with a note if a statement of little weight contradicts it."""
    # What is not sensible is refused later: it is not taken.
    if checked.um is None or not is_sensible(checked.um) or other is None or agree(checked.um, other.um):
        return checked
    text = f"{mpp_text(checked.um)} is taken, but {_as_text(other)} for the finest one"
    return replace(checked, facts=checked.facts.noting(Note(MPP_FLAG, text)))


def _is_fine_for(stated: StatedMpp, power: float | None) -> bool:
    return min(stated.um) >= FINEST_UM or (power is not None and power >= _IMMERSION_POWER)


def _agreed(stated: list[StatedMpp], power: float | None, size_px: tuple[int, int], facts: SlideFacts) -> CheckedMpp:
    """Choose among plausible statements; arguments as for `checked_mpp`."""
    # Statements about another size than that of the page were written before the image was reduced or cut.
    stale = [statement for statement in stated if statement.of_px not in (None, size_px)]
    current = [statement for statement in stated if statement not in stale]
    if stale:
        return _of_another_size(stale[0], current, size_px, facts)
    first = stated[0]
    contrary = next((statement for statement in stated if not agree(statement.um, first.um)), None)
    if contrary is None:
        return CheckedMpp(first.um, facts)
    contradiction = f"{_as_text(first)}, but {_as_text(contrary)}{_usual_mistake(first, contrary)}"
    likely = [statement for statement in stated if power and _within(_mean(statement) * power, _DECIDES)]
    if likely and all(agree(statement.um, likely[0].um) for statement in likely):
        text = f"{contradiction}; {mpp_text(likely[0].um)} fits the {power:g}× that the file states"
        return CheckedMpp(likely[0].um, facts.noting(Note(MPP_FLAG, text)))
    return CheckedMpp(None, replace(facts, mpp_doubt=contradiction))


def _of_another_size(
    stale: StatedMpp, current: list[StatedMpp], size_px: tuple[int, int], facts: SlideFacts
) -> CheckedMpp:
    """Choose where the statement ``stale`` is about another size, because the image was reduced or cut afterwards.

    Args:
        stale: The statement about another size.
        current: Statements about the present size.
        size_px: (height, width) of the finest level.
        facts: The file's facts.
    """
    assert stale.of_px is not None
    factors = [stated_px / now_px for stated_px, now_px in zip(stale.of_px, size_px, strict=True)]
    reduced = (stale.um[0] * factors[0], stale.um[1] * factors[1])
    (height, width), (fy, fx) = stale.of_px, factors
    # Sides are rounded to whole pixels: with the factor of one side, the other may differ by a pixel.
    same_shape = abs(height / fx - size_px[0]) <= 1 or abs(width / fy - size_px[1]) <= 1
    described = (
        f"{_as_text(stale)} for an image of {stale.of_px[0]} × {stale.of_px[1]} px (rows × columns), but the slide has "
        f"{size_px[0]} × {size_px[1]} px"
    )
    for statement in current:
        if same_shape and agree(statement.um, reduced):
            return CheckedMpp(
                statement.um, facts.noting(Note(MPP_FLAG, f"{described}; {_as_text(statement)}, so it was reduced"))
            )
        if not same_shape and agree(statement.um, stale.um):
            return CheckedMpp(
                statement.um, facts.noting(Note(MPP_FLAG, f"{described}; {_as_text(statement)}, so it was cut"))
            )
    if same_shape:
        described += f": {mpp_text(reduced)} if it was reduced, {mpp_text(stale.um)} if it was cut"
    current_texts = "".join(f"; {_as_text(statement)}" for statement in current)
    return CheckedMpp(None, replace(facts, mpp_doubt=described + current_texts))


def _against_power(checked: CheckedMpp, power: float | None) -> CheckedMpp:
    """Return the result of a comparison of the believed value with the magnification: unchanged, noted, or in doubt."""
    if checked.um is None or not power:
        return checked
    # About 10 on most scanners.
    product = sum(checked.um) / 2 * power
    # Aperio states the magnification of the picture, others that of a lens before a smaller or larger camera.
    aperio = any(statement.where == APERIO for statement in checked.facts.mpp)
    if _within(product, _DECIDES if aperio else _USUAL):
        return checked
    text = f"the file states {mpp_text(checked.um)} and a magnification of {power:g}×"
    if _within(product, _POSSIBLE):
        usual = f"{power:g}× usually has {UM_TIMES_POWER / power:.3g}"
        return CheckedMpp(checked.um, checked.facts.noting(Note(MPP_FLAG, f"{text}; {usual}")))
    return CheckedMpp(None, replace(checked.facts, mpp_doubt=text))


def _usual_mistake(a: StatedMpp, b: StatedMpp) -> str:
    ratio = max(_mean(a), _mean(b)) / min(_mean(a), _mean(b))
    if abs(ratio / 2.54 - 1) < 0.01:
        return " (inch and centimetre mixed up)"
    return " (ten times)" if abs(ratio / 10 - 1) < 0.01 else ""


def _as_text(stated: StatedMpp) -> str:
    verb = "say" if stated.where.endswith("s") else "says"
    return f"{stated.where} {verb} {mpp_text(stated.um)}"


def _mean(stated: StatedMpp) -> float:
    return sum(stated.um) / 2


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]
