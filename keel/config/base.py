"""What all sections of a recipe share: kinds of numbers, strictness, and how a setting without effect is refused."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 10**9
"""No count of a run comes near it, and beyond it lies what a mistyped number would ask for."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Several = Annotated[int, Field(ge=2, le=LARGEST)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the tree: unknown keys and wrong types are errors, docstrings are the help texts."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


def refuse(section: Section, inert: dict[str, bool], reason: str) -> None:
    """Raises ValueError for the first field that was changed from its default although it would do nothing."""
    for name, idle in inert.items():
        value = getattr(section, name)
        if idle and value != type(section).model_fields[name].default:
            shown = "" if isinstance(value, Section) else f" {value}"
            raise ValueError(f"{name}{shown} does nothing: {reason}; remove it")
