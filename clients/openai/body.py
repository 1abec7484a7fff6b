"""What all bodies of requests are made of."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

# The first wrong item ends the reading of a list: millions of mistakes in one body would take minutes and gigabytes.
List = Annotated[list[T], Field(fail_fast=True)]
Text = Annotated[str, Field(max_length=64 << 20)]


class Strict(BaseModel):
    """No coercion between JSON types, no NaN. Unknown fields are kept until `fields` has reported or refused them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())
