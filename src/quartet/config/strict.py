"""The base of every section of a recipe, and what its numbers count (shown by `quartet config`, checked nowhere)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Self

from annotated_types import Unit
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from quartet.config.addresses import secret_in
from quartet.config.errors import UserError
from quartet.config.schema import item_annotation
from quartet.config.validation import explain

Tokens = Annotated[int, Unit("tokens")]
Rows = Annotated[int, Unit("rows")]
Steps = Annotated[int, Unit("steps")]
Pairs = Annotated[int, Unit("pairs")]
Batches = Annotated[int, Unit("batches")]
Prompts = Annotated[int, Unit("prompts")]
Groups = Annotated[int, Unit("groups")]
Responses = Annotated[int, Unit("responses")]
Samples = Annotated[int, Unit("samples")]
Sequences = Annotated[int, Unit("sequences")]
Processes = Annotated[int, Unit("processes")]
Devices = Annotated[int, Unit("devices")]
Nats = Annotated[float, Unit("nats")]


_FILES = ("path", "output_dir", "tokenizer", "chat_template", "cache", "directory", "target")
"""Keys that name files or directories."""


class Strict(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # the type checker keeps each model's own signature

        def __init__(self, /, **values: Any) -> None:
            """Raises ``UserError`` for mistakes in ``values``, with the command line's suggestions."""
            try:
                super().__init__(**{name: self._listed(name, value) for name, value in values.items()})
            except ValidationError as error:
                raise explain(error, type(self), type(self).__name__) from None

        # Tells pydantic to build nested sections without this method, so that all mistakes are listed together.
        __init__.__pydantic_base_init__ = True

        def __setattr__(self, name: str, value: Any) -> None:
            raise UserError(
                "recipes and their sections cannot be changed",
                found=f"an assignment to {type(self).__name__}.{name}",
                remedy=f"make another one: recipe.model_copy(update={{{name!r}: …}})",
            )

    @classmethod
    def _listed(cls, name: str, value: Any) -> Any:
        """A section that stands alone where there may be several is one of them."""
        field = cls.model_fields.get(name)
        is_one = isinstance(value, BaseModel) and field is not None and item_annotation(field.annotation) is not None
        return (value,) if is_one else value

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are checked as those of a new recipe are.

        Raises:
            UserError: a mistake in them.
        """
        if not update:
            return super().model_copy(deep=deep)
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update))

    @field_validator("path", "output_dir", "tokenizer", "chat_template", mode="before", check_fields=False)
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, PurePath) else value

    def _misfits(self) -> Iterator[str]:
        """Reasons why the values do not fit together, of which the first is told; after those of the parents."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in _FILES and "\0" in str(value):
                raise ValueError(f"{name} holds a zero byte, which no file's name can")
            if (secret := secret_in(value)) is not None:
                raise ValueError(
                    f"{name} is a URL with {secret}, which would be saved with the run: give it in the environment or "
                    "in fsspec's configuration (docs/storage.md), or bring the file to this machine"
                )
            if name == "output_dir" and value is not None and (value != value.strip() or len(value.splitlines()) > 1):
                raise ValueError(f"output_dir has a line break, or white space around it: {value!r}")
        for reason in self._misfits():
            raise ValueError(reason)
        return self
