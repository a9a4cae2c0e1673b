"""The features that a run or an evaluation reads: from one encoder, checked against their sidecars and slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.csv_table import read_own
from data.files import read_json_object
from data.samples.coverage import MAX_LISTED
from data.samples.dataset import SlideDataset
from data.store.slide_store import SlideStore
from data.tiles.features.bags import FeatureBags, check_sides
from data.tiles.features.folder import open_features
from data.tiles.features.stored import StoredFeatures
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import tissue_tiles
from hyfi_core.errors import RequestError
from workflows.features.feature_folder import FAILED, RUN_FILE, TABLE_FILE, FeatureFolder

_SHORT = 60
"""Largest number of characters of a name or digest in a message."""


@dataclass(frozen=True)
class FeatureSet:
    """A folder of features; vectors are not read yet.

    Attributes:
        folder: The folder, as the user gave it.
        stored: Features by slide id.
        settings: Content of the ``features.json`` of ``hyfi features``; empty if another tool wrote the folder.
    """

    folder: Path
    stored: Mapping[str, StoredFeatures]
    settings: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> FeatureSet:
        """Read what the files of a folder state.

        Raises:
            RequestError: There is no such folder, it has no features, a file is damaged, or they are of several
                encoders.
        """
        try:
            stored = open_features(folder)
        except RequestError as error:
            raise RequestError(f"data.features: {error}") from error
        return cls(folder, stored, read_json_object(folder / RUN_FILE))

    @property
    def features(self) -> int:
        """Length of a vector."""
        return next(iter(self.stored.values())).features

    @property
    def encoder(self) -> str | None:
        """Name of the encoder; None if no file states it."""
        return next(iter(self.stored.values())).encoder or self.settings.get("encoder")

    @property
    def tile_px(self) -> int | None:
        """Height and width of a tile as the encoder saw it; None if the files do not state it."""
        return next(iter(self.stored.values())).tile_px

    @cached_property
    def failures(self) -> dict[str, str]:
        """Why slides have no features, by slide id, as ``features.csv`` states."""
        path = self.folder / TABLE_FILE
        if not path.is_file():
            return {}
        _, rows = read_own(path.read_bytes())
        return {row["slide_id"]: row["reason"] for row in rows if row.get("status") == FAILED}

    def bags(self, dataset: SlideDataset) -> FeatureBags:
        """Return the slides of a dataset as bags of these features.

        Raises:
            RequestError: A slide has none; the message has the reason why `hyfi features` failed for it.
        """
        return FeatureBags(dataset, self.stored, self.failures)

    def check(self, bags: Sequence[FeatureBags]) -> None:
        """Check files against the sidecars of ``hyfi features``, and that they are of the slides as stored now.

        Files of other tools have no sidecars; nothing is checked of them.

        Raises:
            RequestError: Files are damaged, or of an earlier version of their slides; the message names them.
        """
        faults: dict[str, str] = {}
        for slides in bags:
            for index, stored in enumerate(slides.stored):
                fault = self.fault(stored, slides.slide(index))
                if fault is not None:
                    faults[stored.slide_id] = fault
        if faults:
            lines = [f"  slide {name}: {fault}" for name, fault in [*faults.items()][:MAX_LISTED]]
            lines += [f"  … and {len(faults) - MAX_LISTED} more"] if len(faults) > MAX_LISTED else []
            raise RequestError(
                f"data.features: {self.folder} does not fit the store:\n"
                + "\n".join(lines)
                + "\nThe same hyfi features command computes them again"
            )

    def fault(self, stored: StoredFeatures, slide: SlideStore | None) -> str | None:
        """Return what is wrong with a slide's files by their sidecar; None if nothing is, or if there are no sidecars.

        Args:
            stored: The features.
            slide: The slide as it is stored now; None: it is not stored, and only the files are checked.
        """
        # Another tool made the files, without sidecars.
        if "format" not in self.settings:
            return None
        folder = FeatureFolder(self.folder, self.settings["format"], self.settings)
        digest = None
        if slide is not None:
            tiling = Tiling(*(self.settings[key] for key in ("size_px", "stride_px", "mpp", "min_tissue")))
            try:
                # Of the tiles that would be encoded now: it differs if the slide was ingested again.
                digest = tissue_tiles(slide, tiling).digest()
            except RequestError as error:
                return f"out of date: {error}"
        fault = folder.fault(stored.slide_id, digest)
        return "not finished: there is no record of it in .hyfi" if fault == "new" else fault

    def to_json(self, bags: Sequence[FeatureBags]) -> dict[str, Any]:
        """Return ``features`` of a ``model.json``: the facts that features of other slides must share with these."""
        sides = [side for slides in bags for side in slides.sides_um().values()]
        return {
            "length": self.features,
            "encoder": self.encoder,
            "weights_sha256": self.settings.get("weights_sha256"),
            "tile_um": sum(sides) / len(sides) if sides else None,
            "tile_px": self.tile_px,
            "stain_normalisation": self.settings.get("stain_normalisation"),
        }

    def check_like(self, stated: Mapping[str, Any], sides_um: Mapping[str, float]) -> None:
        """Check that these features are of the encoder and resolution of a ``model.json``.

        Args:
            stated: From `to_json`.
            sides_um: Height and width of a tile in micrometres, by slide id.

        Raises:
            RequestError: They are not; the message has both.
        """
        # What is compared -> (of these features, of the features in training).
        pairs: dict[str, tuple[object, object]] = {"vectors of length": (self.features, stated["length"])}
        digests = self.settings.get("weights_sha256"), stated["weights_sha256"]
        if None in digests:
            pairs["encoder"] = self.encoder, stated["encoder"]
        else:  # digests say more than names, which may be names of folders
            pairs["an encoder with weights"] = digests
        stains = self.settings.get("stain_normalisation"), stated.get("stain_normalisation")
        # Only between folders of `hyfi features`: others do not state their stain normalisation.
        if self.settings and stated["weights_sha256"] is not None and stains[0] != stains[1]:
            methods = [stain["method"] if stain else "none" for stain in stains]
            raise RequestError(
                f"{self.folder}: features with stain normalisation {methods[0]}, but the model was trained with "
                f"{methods[1]}{', of another reference' if methods[0] == methods[1] else ''}; compute features of "
                f"these slides with the stain normalisation of its training"
            )
        for fact, (ours, theirs) in pairs.items():
            # What one side does not state cannot be compared.
            if ours is not None and theirs is not None and ours != theirs:
                raise RequestError(
                    f"{self.folder}: {fact} {str(ours)[:_SHORT]}, but the model was trained with {fact} "
                    f"{str(theirs)[:_SHORT]}; compute features of these slides with the encoder of its training"
                )
        if stated["tile_um"] is not None:
            check_sides(sides_um, float(stated["tile_um"]))
