"""The output folder of a prediction: which results exist, and which may be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.files import read_json_object, restore_replaced, write_json_atomically
from data.tiles.features.folder import feature_files
from hyfi_core.errors import RequestError
from pathology.claims import Claim
from pathology.errors import SlideError
from pathology.ingest.identity import SourceStamp
from pathology.predict.inputs import SlideInput
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import PredictOptions
from pathology.predict.results import write_results
from pathology.predict.slide_result import SlideResult
from pathology.predict.table import CLAIM, DONE, FILE_NAME, INCOMPLETE, PREDICTION_FILE, Prediction, PredictionTable
from pathology.predict.tiles.feature_ensemble import features_identity
from pathology.readers.ngff.groups import is_ome_zarr

RUN_FILE = "predictions.json"


class OutFolder:
    """``DIR`` of a prediction; only rank 0 has one.

    ```
    DIR/predictions.csv      one row a slide
    DIR/predictions.json     checkpoints and settings of these predictions
    DIR/<slide_id>/          see pathology.predict.results
    ```

    Args:
        path: The folder; need not exist.
        members: The models.
        spec: Their common input.
        options: Options of the prediction.
    """

    def __init__(self, path: Path, members: Sequence[Member], spec: InputSpec, *, options: PredictOptions) -> None:
        self.path = path
        self._members, self._spec = tuple(members), spec
        self._options, self._overwrite = options, options.overwrite
        self._made_by = {
            "checkpoints": [member.digest for member in members],
            "mpp": spec.mpp,
            "class_names": list(spec.class_names),
            "image": options.image,
        }
        temperatures = [member.temperature for member in members]
        if any(value != 1 for value in temperatures):  # omitted if 1, so that results of older versions stay valid
            self._made_by["temperatures"] = temperatures
        calibrations = [member.config.get("calibration") for member in members]
        if spec.task != "multiclass":
            self._made_by["calibrations"] = calibrations
        # List the folder once: an archive may have a million files.
        self._feature_files = None if options.features is None else feature_files(options.features)
        self._table: PredictionTable | None = None

    def open(self, inputs: Sequence[SlideInput]) -> list[int]:
        """Return the indices of the slides to predict; write nothing.

        Raises:
            RequestError: the folder has predictions of other checkpoints, or of another slide with the same name, or a
                slide's folder was not written by a prediction.
        """
        difference = self._made_by_others()
        if difference is not None and not self._overwrite:
            raise RequestError(
                f"{self.path} has predictions made with {difference}; choose another --out, or use --overwrite to "
                f"start over"
            )
        for slide in inputs:
            self._check_name(slide.slide_id)
        self._table = PredictionTable(
            self.path, self._members[0].readout.columns, with_spread=len(self._members) > 1, keep=difference is None
        )
        if self._overwrite:
            return list(range(len(inputs)))
        for slide in inputs:
            self._refuse_another(slide)
        return [k for k, slide in enumerate(inputs) if not self._finished(slide)]

    def begin(self) -> None:
        """Create the folder and write `RUN_FILE`; predictions of other checkpoints are removed from the table.

        Raises:
            RequestError: The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            restore_replaced(self.path)
            with Claim.wait(self.path, CLAIM):
                # Check again under the claim: another process of this run may have been faster.
                if self._made_by_others() is not None:
                    (self.path / FILE_NAME).unlink(missing_ok=True)
                write_json_atomically(self.path / RUN_FILE, self._made_by)
        except OSError as error:
            raise RequestError(f"{self.path}: cannot be written ({error.strerror}); choose another --out") from error

    def write(self, slide: SlideInput, result: SlideResult) -> None:
        """Write a slide's folder; see `pathology.predict.results`."""
        write_results(self.path / slide.slide_id, result, self._members, self._spec, self._key(slide))

    def note(self, prediction: Prediction) -> None:
        """Set a slide's row in the table."""
        assert self._table is not None, "open comes first"
        self._table.put(prediction)

    def _made_by_others(self) -> str | None:
        """Return how checkpoints or settings of the folder's predictions differ from this run's; None if they agree."""
        path = self.path / RUN_FILE
        if not path.exists():
            if (self.path / FILE_NAME).exists():
                raise RequestError(f"{self.path / FILE_NAME} was not written by hyfi predict; choose another --out")
            return None
        before = read_json_object(path)
        for name, current in self._made_by.items():
            if before.get(name) != current:
                return f"other {name} ({_short(before.get(name))}; now {_short(current)})"
        return None

    def _check_name(self, slide_id: str) -> None:
        """Refuse a slide whose folder cannot be created, or exists with other contents."""
        if slide_id in ("", ".", "..") or "/" in slide_id or "\\" in slide_id or slide_id.startswith("."):
            raise RequestError(f"slide_id {slide_id!r} cannot be a folder name; change it in the manifest")
        folder = self.path / slide_id
        if folder.exists() and not (folder / PREDICTION_FILE).is_file():
            raise RequestError(f"{folder} exists and was not written by hyfi predict; choose another --out")

    def _refuse_another(self, slide: SlideInput) -> None:
        """Refuse a slide if the folder has results of another slide with the same name.

        A file at another path with the same size counts as a copy. Of stored slides, the time must be equal, too,
        because sizes of their metadata repeat.
        """
        assert self._table is not None, "open comes first"
        row = self._table.row(slide.slide_id)
        # A stored slide and a file cannot be compared.
        if row is None or row["path"] == str(slide.path) or row["path"].endswith(".zarr") != slide.stored:
            return
        key = read_json_object(self.path / slide.slide_id / PREDICTION_FILE).get("key") or {}
        before, now = key.get("source") or {}, _identity(slide)
        differs = before != now if slide.stored else before.get("bytes") != now.get("bytes")
        if before and now and differs:  # one is empty if it is unknown
            raise RequestError(
                f"{self.path / slide.slide_id} has the results of {row['path']}, and {slide.path} is another slide of "
                "this name; choose another --out, give it another slide_id by a manifest, or start over by --overwrite"
            )

    def _finished(self, slide: SlideInput) -> bool:
        """Whether the slide's results exist and depend on the same checkpoints, file and options."""
        assert self._table is not None, "open comes first"
        row = self._table.row(slide.slide_id)
        path = self.path / slide.slide_id / PREDICTION_FILE
        # Row and folder: a run that was killed between the two left only one of them.
        if row is None or row["status"] not in (DONE, INCOMPLETE) or not path.exists():
            return False
        # An incomplete slide has a prediction only if one was allowed; it is predicted again if that has changed.
        as_requested = row["status"] == DONE or bool(row["prediction"]) == self._options.allow_partial
        key = dict(read_json_object(path).get("key") or {})
        if self._options.evidence == "map":
            for kind in ("occlusion", "gradient"):  # more than was requested
                key.pop(kind, None)
        return as_requested and key == self._key(slide)

    def _key(self, slide: SlideInput) -> dict[str, Any]:
        """Return all that a slide's results depend on: checkpoints, settings, and the size and time of its file."""
        identity = _identity(slide)
        tissue = self._options.tissue_given(slide.slide_id)
        return {
            **self._made_by,
            "source": identity,
            "slide_mpp": None if slide.stored else self._options.slide_mpp,
            **({"force_mpp": True} if self._options.force_mpp and not slide.stored else {}),
            **({"mpp_from_magnification": True} if self._options.mpp_from_magnification and not slide.stored else {}),
            **({} if tissue is None else {"tissue": tissue}),
            **({"occlusion": self._options.most_forwards} if self._options.evidence == "occlusion" else {}),
            **({"gradient": True} if self._options.evidence == "gradient" else {}),
            **self._identity_of_features(slide.slide_id),
            **self._identity_of_case(slide),
            **({"scene": slide.row["scene"]} if slide.row.get("scene") else {}),
        }

    def _identity_of_features(self, slide_id: str) -> dict[str, Any]:
        """Return size and time of a slide's features, for models of features."""
        return {} if self._feature_files is None else {"features": features_identity(self._feature_files, slide_id)}

    @staticmethod
    def _identity_of_case(slide: SlideInput) -> dict[str, Any]:
        """Return the slides of a case that is one bag, each with size and time; nothing of one slide."""
        others = [replace(slide, path=path) for path in slide.case_slides] if len(slide.case_slides) > 1 else []
        return {"case": {other.path.name: _identity(other) for other in others}} if others else {}


def _identity(slide: SlideInput) -> dict[str, int]:
    """Return the size and time of a slide, which show whether it has changed; empty if they cannot be read.

    Of a slide file, its own; of a stored slide, those of ``zarr.json``, which lists the digests of all its files; of an
    OME-Zarr store of another program, those of all its files together, see `SourceStamp`.
    """
    try:
        if not slide.stored and is_ome_zarr(slide.path):
            stamp = SourceStamp.of(slide.path)
            return {"bytes": stamp.size_bytes, "mtime_ns": stamp.mtime_ns}
        status = (slide.path / "zarr.json" if slide.stored else slide.path).stat()
    except (OSError, SlideError):
        return {}
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _short(value: object) -> str:
    """Return a value, or the items of a list, cut to 12 characters each: digests are long."""
    parts = value if isinstance(value, list) else [value]
    return ", ".join(str(part)[:12] for part in parts)
