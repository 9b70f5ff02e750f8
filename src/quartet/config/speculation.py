"""What sections of ``rollout.speculation`` have in common, which plug-ins add by ``type``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quartet.config.common import Strict
from quartet.config.plugins import DrafterType, plugins

if TYPE_CHECKING:
    from quartet.config.recipe import RLRecipe

DRAFTERS: dict[str, DrafterType] = {name: kind for plugin in plugins() for name, kind in plugin.drafters.items()}
"""What drafts tokens of which one forward of the engine verifies several, by ``type``."""


class Speculation(Strict):
    """A section of a ``type``. A key ``path`` in it names the drafter's model: a directory, its URL, or the hub's."""

    if TYPE_CHECKING:
        type: str

    @property
    def learns(self) -> bool:
        """Its model learns along with the actor."""
        return False

    def misfits_with(self, recipe: RLRecipe) -> Iterator[str]:
        """Why it does not fit the other sections."""
        yield from ()
