"""What the values of a configuration may be: kinds of numbers with their bounds, and the rules of every section."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(gt=0, strict=True)]
LARGEST_SIZE = 2**31 - 1
"""Of a tensor's dimension. assumed: libraries below count in 32 bits here and there, and no model comes near."""
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE, strict=True)]
LARGEST_SEED = 2**63 - 1
"""Derived: random numbers are made from 64 bits, one of which is a sign to some libraries."""
LARGEST_ROPE_THETA = 1e12
"""assumed: a thousand times that of any model, among them those for 2 million tokens."""
LARGEST_LR = 100.0
"""derived: AdamW moves every weight by about lr a step, and weights begin as model.init_std, some hundredths; assumed:
no more than this is ever meant."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Common rules of all sections: frozen, nothing unknown, no infinities, no silent conversion of text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *get_args(annotation)):
                raise PydanticCustomError("truth_value", "this is no switch: give a value other than true or false")
        return value
