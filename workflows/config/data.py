"""The sections ``data`` and ``model`` of a run's YAML: what is learnt from, and what learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from workflows.config.section import Count, Positive, Section, Share, Size, UserPath


class AugmentConfig(Section):
    """How training images are varied; each is a function of (seed, epoch, slide) alone."""

    flips: bool = Field(
        True, description="true or false: mirror, and turn by quarters (by halves where the image is not square)"
    )
    stain: Share = Field(
        0.1,
        description="a number from 0 to 1: spread of the haematoxylin and eosin amounts, factors in 1 ± this; 0 turns"
        " it off",
    )
    colour: Share = Field(
        0.05, description="a number from 0 to 1: spread of brightness and contrast, factors in 1 ± this; 0 turns it off"
    )


def _augment(value: Any) -> Any:
    if value is True:
        return AugmentConfig()
    return AugmentConfig(flips=False, stain=0.0, colour=0.0) if value is False or value is None else value


class DataConfig(Section):
    """Which slides, which labels, and how one training image is made of a slide."""

    store: UserPath = Field(description="a folder: the one that `hyfi ingest --out` wrote")
    labels: UserPath | None = Field(
        None,
        description="a CSV file: the class of each slide, by slide_id or case_id; left out: the store's own "
        "manifest.csv",
    )
    allow_unmatched: bool = Field(
        False,
        description="true or false: whether labelled rows may match no slide of the store, as where only a part of a "
        "cohort is ingested",
    )
    target: str = Field(
        "label",
        min_length=1,
        description="a column of the labels: holds the class; where it is empty the slide is not used",
    )
    task: Literal["multiclass"] = Field(
        "multiclass", description="multiclass: the kind of question; each slide has one class of two or more"
    )
    splits: UserPath | None = Field(
        None, description="a CSV file: what `hyfi split` wrote; left out: the labels with their split_column"
    )
    split_column: str = Field(
        "split",
        min_length=1,
        description="a column of the splits: says train, val or test (split_2 where `hyfi split --folds` made folds)",
    )
    size_px: Size = Field(description="a whole number of pixels, or [height, width]: size of one training image")
    mpp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["native"] = Field(
        1.0,
        description="a number > 0, or native: microns per pixel of the training images; a level of the store must have "
        "it; native: those of the store's finest levels",
    )
    view: Literal["pack", "crop"] = Field(
        "pack",
        description="pack or crop: how a slide becomes one image: its tissue moved together (pack), or the window "
        "with most tissue (crop)",
    )
    align_px: Positive = Field(
        64,
        description="a whole number ≥ 1: pixels of the grid on which tissue pieces are moved; a multiple of the "
        "network's stride",
    )
    min_coverage: Share = Field(
        0.9,
        description="a number from 0 to 1: least share of its tissue that each slide's image shows; less is refused",
    )
    batch_size: Positive = Field(
        1,
        description="a whole number ≥ 1: slides of one batch, over all replicas; a multiple of plan.replicas × "
        "plan.microbatches",
    )
    augment: Annotated[AugmentConfig, BeforeValidator(_augment)] = Field(
        default_factory=AugmentConfig,
        description="true, false, or the keys flips, stain, colour: how training images are varied; true: as the "
        "defaults say",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="none or balanced: what a class counts in the loss; balanced: the more, the rarer it is"
    )
    case_aggregate: Literal["mean", "max", "none"] = Field(
        "mean",
        description="mean, max or none: who speaks for a case of several slides: all of them alike (mean), the most "
        "advanced (max), or nobody (none: no metrics by case)",
    )
    sampling: Literal["shuffle", "balanced", "weighted"] = Field(
        "shuffle",
        description="shuffle, balanced or weighted: which slides an epoch draws: each once (shuffle), each class "
        "alike often (balanced), or as weights_column says (weighted)",
    )
    weights_column: str | None = Field(
        None,
        min_length=1,
        description="a column of the labels: numbers ≥ 0, how often each slide is drawn against others (sampling: "
        "weighted)",
    )
    prefetch: Positive = Field(
        2, description="a whole number ≥ 1: batches that loaders send ahead of the one being worked on"
    )
    workers: Positive | None = Field(
        None, description="a whole number ≥ 1: decoding processes of each loader; left out: as many as it has threads"
    )
    cache_bytes: Count = Field(
        0,
        description="a whole number ≥ 0: bytes of decoded images that each loader (each trainer where there are none)"
        " keeps in memory for later epochs",
    )

    @model_validator(mode="after")
    def _weights_are_named(self) -> DataConfig:
        if (self.sampling == "weighted") != (self.weights_column is not None):
            raise ValueError(
                f"sampling: {self.sampling} and weights_column: {self.weights_column}; weighted needs a column of the "
                "labels, the others take none"
            )
        return self


class ModelConfig(Section):
    """The classifier: an ordinary PyTorch module."""

    name: str = Field(
        "resnet18",
        min_length=1,
        description="resnet6, resnet10, resnet18, resnet34, resnet50, resnet_v1, resnet_v2, amoebanet_d, or "
        "package.module:factory: a built-in network, or a function of your own that returns one",
    )
    classes: Positive | tuple[str, ...] | None = Field(
        None,
        description="a whole number ≥ 1, or a list of names: the classes, in order; left out: those of the labels, "
        "sorted",
    )
    weights: UserPath | None = Field(
        None,
        description="a .safetensors or .pth file: weights to begin with, under torchvision's names; left out: random "
        "ones",
    )
    norm: Literal["train", "frozen", "group"] = Field(
        "train",
        description="train, frozen or group: what normalises in the built-in ResNets: batch norm (train), batch norm "
        "that stays as loaded (frozen), or group norm (group)",
    )
    pool: Literal["avg", "max"] = Field(
        "avg",
        description="avg or max: what the built-in ResNets take of their last map; max suits classes that one small "
        "focus decides",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keys of the model: its further arguments by name, as in {width: 16}"
    )
