"""Base class of the sections of a run's YAML, and types of their values."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from data.location import location

OWN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""Form of ``package.module:function``."""
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _user_path(value: Any) -> Any:
    return location(value).expanduser() if isinstance(value, str) and value else value


def _pair(value: Any) -> Any:
    # True is an int, but no size.
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _switch(value: Any) -> Any:
    """Return ``on`` or ``off`` for true or false, as which YAML reads these words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "off", "on"], BeforeValidator(_switch)]
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_switch)]
UserPath = Annotated[Path, BeforeValidator(_user_path)]
Size = Annotated[tuple[Positive, Positive], BeforeValidator(_pair)]


class Section(BaseModel):
    """A section of the file: immutable; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, optional or not; None if the field holds a plain value."""
    # `Section | None` has arguments, `Section` alone has none.
    types = [kind for kind in get_args(field.annotation) if kind is not NoneType] or [field.annotation]
    if len(types) == 1 and isinstance(types[0], type) and issubclass(types[0], BaseModel):
        return types[0]
    return None


def element_section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that each element of a field's list is; None if the field is no list of sections."""
    for kind in (field.annotation, *get_args(field.annotation)):
        elements = get_args(kind)
        if get_origin(kind) is tuple and isinstance(elements[0], type) and issubclass(elements[0], BaseModel):
            return elements[0]
    return None
