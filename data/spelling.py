"""Which texts in users' tables are spellings of one slide, case or class.

```
canonical form     'P 007' 'p\u00a0007'   compared by Unicode form, invisible characters, dashes, white space and case
                   'K12' '\u041a12'       by the look of letters: the second has a Cyrillic one
                   '007' '7' '7.0'        and, if the whole text is a number, by its zeros
ending             'a.svs' 'a'            only if one of them has none: a.tif and a.tiff are two slides; names of a
                                          table and a store that differ in nothing else are joined without asking
no white space     'low grade' 'lowgrade' classes only
```
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hyfi_core.errors import RequestError

NameKind = Literal["name", "class"]

ADVICE = "write each in one way, or join them with --merge-alike (in a run: data.merge_alike=true)"
_MOST_NAMED = 10
_MOST_JOINED = 3
# `+`, as endings are stacked: a.ome.tiff, a.ome.zarr.
_ENDINGS = re.compile(r"(\.(svs|tiff?|btf|ndpi|mrxs|scn|vms|vmu|bif|svslide|qptiff|czi|dcm|ome|zarr))+$", re.IGNORECASE)
# A comma and three zeros separate thousands: "1,000" is not 1.
_WHOLE_NUMBER = re.compile(r"([+-]?)0*([0-9]+?)(?:\.0+|,0{1,2})?")
_MINUS = "\u2212"
_LOOK_ALIKE = str.maketrans(
    "\u0430\u0432\u0435\u043a\u043c\u043d\u043e\u0440\u0441\u0442\u0443\u0445\u0456\u0458\u0455",
    "abekmhopctyxijs",
)
"""Cyrillic letter -> the Latin letter that it looks like, small or capital: users of both keyboards mix them."""
_ALPHABET = "alphabet (Cyrillic letters that look like Latin ones)"
_WITHOUT_ARTICLE = ("invisible characters", "white space", "zeros or dashes")
_ROUNDED = re.compile(r"[0-9]([.,][0-9]+)?E\+[0-9]{2,3}", re.IGNORECASE)
"""Long numbers as spreadsheets round them, ``1.23E+11``: names that differ in later digits become the same."""


@lru_cache(2**17)
def canonical(text: str) -> str:
    """Return the form by which texts are compared: two spellings of one name have the same form.

    It leaves out differences of case, Unicode form, invisible characters, white space, dashes, letters that look alike
    and, in whole numbers, zeros that do not count.
    """
    form = text.casefold()
    # Normalised twice, because folding the case can undo the normal form. Unicode's minus sign is not a dash (Pd).
    if not (text.isascii() and text.isprintable()):
        form = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        form = "".join("-" if c == _MINUS or unicodedata.category(c) == "Pd" else c for c in without_invisible(form))
        form = form.translate(_LOOK_ALIKE)
    form = " ".join(form.split())
    # Of a whole number, the sign and the digits, without zeros in front and behind the point: 7 for 007 and 7.0.
    number = _WHOLE_NUMBER.fullmatch(form)
    return form if number is None else number[1].replace("+", "") + number[2]


def without_invisible(text: str) -> str:
    """Return a text without zero-width and control characters; white space is kept."""
    return "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))


def without_ending(name: str) -> str:
    """Return a slide's name without the endings of slide files: ``a`` for ``a.ome.tiff``."""
    return _ENDINGS.sub("", name)


def forms_of(texts: Iterable[str], kind: NameKind = "name") -> dict[str, str]:
    """Return text -> normal form; texts with the same form are spellings of one name."""
    forms = {text: canonical(text) for text in texts}
    if kind == "class":
        forms = {text: form.replace(" ", "") for text, form in forms.items()}
    all_forms = set(forms.values())
    # Canonical again, because "007.svs" without its ending is a number, whose zeros do not count.
    shorter = {form: canonical(without_ending(form)) for form in all_forms}
    # A text loses its file ending only if another text is the name without it: a.tif and a.tiff alone stay two names.
    return {text: shorter[form] if shorter[form] in all_forms else form for text, form in forms.items()}


@dataclass(frozen=True)
class Spelled:
    """The spelling of each value of a column.

    Attributes:
        spelling: Text -> spelling.
        joined: (text, spelling) of each text whose spelling differs from it.
    """

    spelling: Mapping[str, str]
    joined: tuple[tuple[str, str], ...]


def one_spelling(
    texts: Sequence[str],
    kind: NameKind,
    where: str,
    *,
    merge: bool,
    lines: Sequence[int] = (),
    known_names: Iterable[str] = (),
    knows: str = "the store",
    advice: str = ADVICE,
) -> Spelled:
    """Choose one spelling of each name: that of ``known_names``, else the most frequent, else the first.

    A text that differs from a known name only by the ending of a slide file gets that name even without ``merge``.

    Args:
        texts: The values; empty ones are left out.
        kind: Whether the values are names or classes.
        where: File and column, for messages.
        merge: True: join several spellings of one name; False: refuse them.
        lines: Line of each text in the file, for messages.
        known_names: Spellings that never change, even if two of them have the same form.
        knows: Who has ``known_names``, for messages.
        advice: The last line of the message if spellings are refused.

    Raises:
        RequestError: A name has several spellings and ``merge`` is off, a text may be either of two known names, or a
            text that is not a known name is a number that a spreadsheet has rounded.
    """
    settled = dict.fromkeys(text for text in known_names if text)
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + bool(text)
    counts = {text: count for text, count in counts.items() if text}
    # Reversed, so that a repeated text gets the line of its first occurrence.
    line_of = dict(zip(reversed(texts), reversed(lines), strict=True)) if lines else {}
    if kind == "name":
        _refuse_rounded([text for text in counts if text not in settled], where, line_of)
    forms = forms_of([*settled, *counts], kind)
    groups: dict[str, list[str]] = {}
    unsettled = [text for text in counts if text not in settled]
    # The first text of a group is its spelling: settled ones first, then by frequency (`sorted` is stable).
    for text in [*settled, *sorted(unsettled, key=lambda text: -counts[text])]:
        groups.setdefault(forms[text], []).append(text)
    spelling, pairs = {}, []
    for text in counts:
        # With two settled spellings of one form, it is unknown which of them an unsettled text means.
        first, *more = groups[forms[text]]
        spelling[text] = text if text in settled else first
        if spelling[text] != text:
            if more and more[0] in settled:
                raise RequestError(f"{where}: {shown(text)} may be {shown(first)} or {shown(more[0])} of {knows}")
            pairs.append((text, first))
    # Pairs that only ``merge`` joins: all but those of a known name, and a text that lacks its file ending.
    unclear = [pair for pair in pairs if pair[1] not in settled or len({without_ending(text) for text in pair}) > 1]
    if unclear and not merge:
        raise RequestError(_refusal(unclear, where, line_of, settled.keys(), knows) + f"\n{advice}")
    return Spelled(spelling, tuple(pairs))


def joined_note(where: str, joined: Sequence[tuple[str, str]]) -> str:
    """Return a sentence about spellings that were joined."""
    pairs = [f"{shown(text)} as {shown(spelling)}" for text, spelling in joined[:_MOST_JOINED]]
    more = f" and {len(joined) - _MOST_JOINED} more" if len(joined) > _MOST_JOINED else ""
    return f"{where}: read {', '.join(pairs)}{more}"


def difference(a: str, b: str) -> str:
    """Return the kind of difference between two spellings of one name, such as ``case``."""
    steps: tuple[tuple[str, Callable[[str], str]], ...] = (
        ("Unicode form", lambda text: unicodedata.normalize("NFKC", text)),
        ("invisible characters", without_invisible),
        ("white space", lambda text: " ".join(text.split())),
        ("case", lambda text: unicodedata.normalize("NFKC", text.casefold())),
        (_ALPHABET, lambda text: text.translate(_LOOK_ALIKE)),
        ("zeros or dashes", canonical),
        ("white space", lambda text: text.replace(" ", "")),  # between words, which only classes may lack
    )
    for name, step in steps:
        a, b = step(a), step(b)
        if a == b:
            return name
    return "ending"


def shown(text: str) -> str:
    """Return a text in quotes, with escapes for characters that would not be visible."""
    return repr(text) if unicodedata.normalize("NFC", text) == text else ascii(text)


def _refuse_rounded(texts: Iterable[str], where: str, lines: Mapping[str, int]) -> None:
    """Refuse names that a spreadsheet has rounded.

    Raises:
        RequestError: There is one.
    """
    rounded = next((text for text in texts if _ROUNDED.fullmatch(text)), None)
    if rounded is not None:
        at = f" (line {lines[rounded]})" if rounded in lines else ""
        raise RequestError(
            f"{where}: {shown(rounded)}{at} is a number that a spreadsheet has rounded, so that several names may be "
            "one here; make the column text in the spreadsheet, enter the names again, and save the table again"
        )


def _refusal(
    pairs: Sequence[tuple[str, str]], where: str, lines: Mapping[str, int], settled: Iterable[str], knows: str
) -> str:
    """Return the message about names that differ only in how they are written.

    Args:
        pairs: (name, its other spelling).
        where: File and column of these names.
        lines: Name -> its line, if the names are from a table.
        settled: Known names, which ``knows`` has.
        knows: Subject of a sentence, such as ``the store``.
    """

    def escaped(text: str, kind: str) -> str:
        # Only escapes show the difference between letters that look alike.
        return ascii(text) if kind == _ALPHABET else shown(text)

    def quoted(text: str, kind: str) -> str:
        return f"{escaped(text, kind)} (line {lines[text]})" if text in lines else escaped(text, kind)

    described = []
    for text, spelling in pairs[:_MOST_NAMED]:
        kind = difference(text, spelling)
        other = "other" if kind in _WITHOUT_ARTICLE else "another"
        described.append(
            f"  {quoted(text, kind)}: {knows} has {escaped(spelling, kind)}, {other} {kind}"
            if spelling in settled
            else f"  {quoted(text, kind)} and {quoted(spelling, kind)} differ only in {kind}"
        )
    described += [f"  … and {len(pairs) - _MOST_NAMED} more"] if len(pairs) > _MOST_NAMED else []
    return "\n".join([f"{where}: names that are written in several ways:", *described])
