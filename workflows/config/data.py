"""The sections ``data`` and ``model`` of a run's YAML."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from data.missing import MISSING
from data.samples.exclusion import SLIDE_FLAGS
from workflows.config.section import OWN, AboveZero, Count, Positive, Section, Share, Size, UserPath
from workflows.config.targets import SEVERAL, TargetConfig, TargetKeys, check_titles, several_facts
from workflows.config.tasks import TaskFacts
from workflows.config.tiles import AggregatorConfig, EncoderConfig, TilesConfig

if TYPE_CHECKING:
    from data.samples.augment import Augment


class AugmentConfig(Section):
    """Augmentation of training images; it depends only on (seed, epoch, slide)."""

    flips: bool = Field(
        True, description="true or false: flip, and rotate by multiples of 90° (of 180° if the image is not square)"
    )
    stain: Share = Field(
        0.1,
        description="a number from 0 to 1: spread of the haematoxylin and eosin amounts, factors in 1 ± this; 0 turns"
        " it off",
    )
    colour: Share = Field(
        0.05, description="a number from 0 to 1: spread of brightness and contrast, factors in 1 ± this; 0 turns it off"
    )
    own: Annotated[str, Field(pattern=OWN)] | None = Field(
        None,
        description="package.module:function: your own change of colours, called with pixels (3, h, w) uint8 and a "
        "random generator; default: none",
    )

    @property
    def off(self) -> bool:
        """Whether images stay as they are."""
        return not (self.flips or self.stain or self.colour or self.own)

    def build(self) -> Augment:
        """Return the augmentation."""
        from data.samples.augment import Augment

        return Augment(self.flips, self.stain, self.colour, self.own or "")


def _augment(value: Any) -> Any:
    if isinstance(value, str):
        return AugmentConfig(stain=0.0, colour=0.0, own=value) if re.fullmatch(OWN, value) else value
    if value is True:
        return AugmentConfig()
    return AugmentConfig(flips=False, stain=0.0, colour=0.0) if value is False or value is None else value


def _stain_method(value: Any) -> Any:
    if value == "vahadane":
        raise ValueError(
            "given vahadane; its stains are learned from a random start and depend on the solver, so a slide would not "
            "have the same colours everywhere; use macenko, which has a closed form"
        )
    return "none" if value is None or value is False else value


class DataConfig(TargetKeys):
    """Which slides, which labels, and how one training image is made of a slide."""

    store: UserPath = Field(description="a folder: the store that `hyfi ingest --out` wrote")
    labels: UserPath | None = Field(
        None,
        description="a CSV file: the class of each slide, by slide_id or case_id; default: the store's own "
        "manifest.csv",
    )
    id_column: str | None = Field(
        None,
        min_length=1,
        description="a column of the labels: the names of the slides, with or without the ending of a file; default: "
        "slide_id",
    )
    allow_unmatched: bool = Field(
        False,
        description="true or false: whether labels may name slides that are not in the store, for instance if only a "
        "part of a cohort is ingested",
    )
    merge_alike: bool = Field(
        False,
        description="true or false: whether slides, cases and classes that are written in several ways (P1, p1; 7, "
        "007) are joined; otherwise they are refused",
    )
    targets: tuple[TargetConfig, ...] | None = Field(
        None,
        description="a list of targets, each with keys of its own (target, task, loss, time_bins, class_weights as in "
        "data, and name, weight, classes): several targets that one model learns together (docs/tasks.md); slides that "
        "lack some of them are used for the others; default: one target",
    )
    exclude_flags: tuple[str, ...] = Field(
        (),
        description="a list of flags, as in [blur, pen, truncated]: slides of the store with one of them are left out "
        "of training and validation; default: none",
    )
    missing: tuple[str, ...] | None = Field(
        None,
        description="a list of words: cells of labels and splits that count as empty; default: NA, nan, None, unknown, "
        "- and others (docs/tables.md)",
    )
    splits: UserPath | None = Field(
        None, description="a CSV file: what `hyfi split` wrote; default: the split_column of the labels"
    )
    split_column: str = Field(
        "split",
        min_length=1,
        description="a column of the splits: train, val or test (split_2, for instance, after `hyfi split --folds`)",
    )
    tiles: TilesConfig | None = Field(
        None,
        description="the keys below: slides are bags of tiles, for model.encoder and model.aggregator; default: each "
        "slide is one image",
    )
    features: UserPath | None = Field(
        None,
        description="a folder that `hyfi features`, TRIDENT, CLAM or STAMP wrote: slides are bags of these features, "
        "for model.aggregator; default: each slide is one image",
    )
    size_px: Size | None = Field(
        None,
        description="a whole number of pixels, or [height, width]: size of one training image; needed without "
        "data.tiles and data.features",
    )
    mpp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["native"] = Field(
        1.0,
        description="a number > 0, or native: microns per pixel of the training images, those of a level of the "
        "store; native: those of its finest level",
    )
    view: Literal["pack", "crop"] = Field(
        "pack",
        description="pack or crop: how a slide becomes one image: pieces of tissue packed side by side (pack), or "
        "the window with most tissue (crop)",
    )
    align_px: Positive = Field(
        64,
        description="a whole number ≥ 1: pixels of the grid to which tissue pieces are aligned; use a multiple of "
        "the model's stride",
    )
    min_coverage: Share = Field(
        0.9,
        description="a number from 0 to 1: smallest fraction of its tissue that each slide's image must show; less "
        "is refused",
    )
    batch_size: Positive = Field(
        1,
        description="a whole number ≥ 1: slides of one batch, over all replicas; a multiple of plan.replicas × "
        "plan.microbatches",
    )
    augment: Annotated[AugmentConfig, BeforeValidator(_augment)] = Field(
        default_factory=AugmentConfig,
        description="true, false, package.module:function, or the keys flips, stain, colour, own: augmentation of "
        "training images; true: the defaults; a function of your own changes colours (docs/tasks.md), beside flips",
    )
    stain_normalisation: Annotated[Literal["none", "macenko", "reinhard"], BeforeValidator(_stain_method)] = Field(
        "none",
        description="none, macenko or reinhard: the colours of each slide become those of a reference, before "
        "augmentation, in training, validation and prediction (docs/stain.md)",
    )
    bag: Literal["slide", "case"] = Field(
        "slide",
        description="slide or case: with data.tiles and data.features, whether a bag has the tiles or features of one "
        "slide, or of all slides of a case (docs/tiles.md)",
    )
    stain_reference: str | None = Field(
        None,
        min_length=1,
        description="the name of a slide of the store, a stored slide (STORE/NAME.zarr), or a picture of tissue (PNG, "
        "JPEG, TIFF): stain_normalisation gives its colours to all slides; default: the colours that the method's "
        "authors published",
    )
    case_aggregate: Literal["mean", "max", "logits", "none"] = Field(
        "mean",
        description="mean, max, logits or none: how predictions of a case's slides are combined: mean of probabilities "
        "(mean), their maximum (max), mean of outputs (logits), or not at all, without metrics by case (none)",
    )
    sampling: Literal["shuffle", "balanced", "weighted"] = Field(
        "shuffle",
        description="shuffle, balanced or weighted: which slides an epoch draws: each once (shuffle), each class "
        "equally often (balanced), or by weights_column (weighted)",
    )
    weights_column: str | None = Field(
        None,
        min_length=1,
        description="a column of the labels: numbers ≥ 0, how often each slide is drawn relative to others "
        "(sampling: weighted)",
    )
    prefetch: Positive = Field(
        2,
        description="a whole number ≥ 1: batches that loaders send ahead of the current one; with plan.cells they send "
        "box by box, at most 5 % of plan.memory_bytes ahead; with tiles and features it is a number of messages of up "
        "to 32 tiles that each loader sends ahead",
    )
    workers: Positive | None = Field(
        None,
        description="a whole number ≥ 1: decoding processes of each loader; default: its number of threads, "
        "and more while trainers wait and cores are free",
    )
    cache_bytes: Count = Field(
        0,
        description="a whole number ≥ 0: bytes of decoded images that each loader (or trainer, without loaders) "
        "keeps in memory for later epochs",
    )
    node_cache_bytes: Count = Field(
        0,
        description="a whole number ≥ 0: bytes of decoded chunks of the store that all processes of a node share on "
        "its disk, so that each node reads a chunk once; 0: none",
    )
    node_cache: UserPath | None = Field(
        None,
        description="a folder on a disk of each node, or /dev/shm: where the cache of node_cache_bytes is, in a folder "
        "hyfi-chunks-<uid>; default: the system's temporary folder",
    )

    @field_validator("exclude_flags")
    @classmethod
    def _flags_exist(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [flag for flag in value if flag not in SLIDE_FLAGS]
        if unknown:
            raise ValueError(f"given {', '.join(map(repr, unknown))}; allowed: {', '.join(SLIDE_FLAGS)}")
        return value

    @field_validator("size_px")
    @classmethod
    def _size_is_given(cls, value: Size | None, info: ValidationInfo) -> Size | None:
        # `info.data` lacks a key whose value is invalid (`...` here): it has an error of its own.
        if value is None and info.data.get("tiles", ...) is None and info.data.get("features", ...) is None:
            raise ValueError(
                "missing; needed: a whole number of pixels, or [height, width], for images of whole slides; or "
                "data.tiles for an encoder of tiles; or data.features for features that are computed already"
            )
        return value

    @property
    def kind(self) -> Literal["images", "tiles", "features"]:
        """What a slide is to the model: a whole image, a bag of tiles, or a bag of stored features."""
        if self.features is not None:
            return "features"
        return "images" if self.tiles is None else "tiles"

    @property
    def image_px(self) -> tuple[int, int]:
        """Height and width of an input of the network: an image or a tile; (1, 1) for features, which are vectors."""
        if self.features is not None:
            return 1, 1
        if self.tiles is not None:
            return self.tiles.size_px, self.tiles.size_px
        assert self.size_px is not None, "checked with the configuration"
        return self.size_px

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the target, or of all targets."""
        if self.targets is not None:
            return tuple(column for target in self.targets for column in target.columns)
        return super().columns

    @property
    def facts(self) -> TaskFacts:
        """The facts of the task, or of all targets together."""
        return super().facts if self.targets is None else several_facts(self.targets)

    @property
    def task_name(self) -> str:
        """The task of a ``model.json``."""
        return self.task if self.targets is None else SEVERAL

    @property
    def missing_words(self) -> tuple[str, ...]:
        """The words that mean that a value is missing."""
        return MISSING if self.missing is None else self.missing

    @model_validator(mode="after")
    def _one_target_or_several(self) -> DataConfig:
        if self.sampling == "balanced" and not self.facts.samples_classes:
            raise ValueError(f"sampling: given balanced; task {self.task_name} has no classes to balance")
        if self.targets is None:
            return self
        set_keys = [key for key, field in TargetKeys.model_fields.items() if getattr(self, key) != field.default]
        if set_keys:
            raise ValueError(f"{', '.join(set_keys)}: given beside targets; give each of the targets its own")
        check_titles(self.targets)
        return self

    @model_validator(mode="after")
    def _cases_are_bags(self) -> DataConfig:
        if self.bag == "case" and self.kind == "images":
            raise ValueError(
                "bag: given case; a model of whole images takes one slide; use data.tiles or data.features, or "
                "data.case_aggregate, which combines the predictions of a case's slides"
            )
        if self.bag == "case" and self.case_aggregate != "mean":
            raise ValueError(
                f"case_aggregate: given {self.case_aggregate} beside bag: case, where a case has one prediction; leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _reference_has_a_method(self) -> DataConfig:
        if self.stain_reference is not None and self.stain_normalisation == "none":
            raise ValueError("stain_reference: without stain_normalisation; give macenko or reinhard")
        return self

    @model_validator(mode="after")
    def _weights_are_named(self) -> DataConfig:
        if (self.sampling == "weighted") != (self.weights_column is not None):
            raise ValueError(
                f"sampling: {self.sampling} and weights_column: {self.weights_column}; weighted needs a column of the "
                "labels, the others take none"
            )
        return self


Channels = tuple[Share, Share, Share]
Scales = tuple[AboveZero, AboveZero, AboveZero]


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
        description="a whole number ≥ 1, or a list of names: the classes, in order; default: those of the labels, "
        "sorted",
    )
    weights: UserPath | None = Field(
        None,
        description="a .safetensors or .pth file: initial weights, under the model's names (those of the built-in "
        "ResNets are torchvision's), with or without a prefix; default: random",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description='a list of patterns, as in [conv1, layer1, "*.norm*"]: parameters, or modules with all of '
        "theirs, that are not trained; frozen batch norm uses its loaded statistics",
    )
    freeze_epochs: Positive | None = Field(
        None,
        description="a whole number ≥ 1: epochs after which the parameters of model.freeze are trained, too; default: "
        "never",
    )
    mean: Channels | None = Field(
        None,
        description="three numbers from 0 to 1: means of red, green and blue that are subtracted from pixels, as the "
        "weights were trained; default: ImageNet's",
    )
    std: Scales | None = Field(
        None,
        description="three numbers > 0: standard deviations of red, green and blue by which pixels are divided; "
        "default: ImageNet's",
    )
    norm: Literal["train", "frozen", "group"] = Field(
        "train",
        description="train, frozen or group: normalisation in the built-in ResNets: batch norm (train), batch norm "
        "with the loaded statistics (frozen), or group norm (group)",
    )
    pool: Literal["avg", "max"] = Field(
        "avg",
        description="avg or max: global pooling in the built-in ResNets; max suits classes that depend on one small "
        "focus",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the model: as in {width: 16}"
    )
    encoder: EncoderConfig | None = Field(
        None, description="the keys below: an encoder of tiles (data.tiles) in place of model.name; default: none"
    )
    aggregator: AggregatorConfig | None = Field(
        None,
        description="the keys below: the network from the features of tiles to outputs; default with data.tiles and "
        "data.features: its defaults",
    )

    @model_validator(mode="after")
    def _freezes_something(self) -> ModelConfig:
        if self.freeze_epochs is not None and not self.freeze:
            raise ValueError(f"freeze_epochs: {self.freeze_epochs} without freeze; name what is frozen until then")
        return self

    @property
    def built_in(self) -> bool:
        """Whether the model is one of this package's networks for whole images."""
        from hyfi_core.models.by_name import is_built_in  # loads torch

        return self.encoder is None and is_built_in(self.name)
