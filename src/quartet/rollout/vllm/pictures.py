"""Prompts with pictures as vLLM's engine core takes them. Imported only where vLLM is installed.

The core is given what the run's own processor makes of a picture, and where its rows of features go, in place of the
picture itself: vLLM would process and place it once more, and need not come to the same. So pixels are those that the
trainer's tower has, every answer's tokens stand where the trainer's do, and vLLM's caches know pictures by their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise

import torch
from transformers import BatchFeature
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from quartet.batch.pictures import is_later_row, is_picture, key_of
from quartet.config.errors import UserError
from quartet.text.pictures import PictureCodec

_KEPT = 16
"""Processed pictures; the answers of a group, which come one after the other, share theirs."""


class PictureInputs:
    """
    Args:
        config: of the model in vLLM.
        pictures: of the run.
    """

    def __init__(self, config: ModelConfig, pictures: PictureCodec) -> None:
        self._dtype, self._processor, self._store = config.dtype, pictures.processor, pictures.store
        self._fields = MULTIMODAL_REGISTRY.create_processor(config)._get_mm_fields_config
        self._item = lru_cache(_KEPT)(self._read)

    def __call__(self, ids: Sequence[int]) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Returns the ids with placeholders in the pictures' places, and the pictures in the order in which they come.

        Raises:
            UserError: the run has no such picture, it cannot be read, or has other places here.
        """
        places = [place for place, token in enumerate(ids) if is_picture(token)]
        firsts = [n for n, place in enumerate(places) if not is_later_row(ids[place])]
        parts = [places[start:stop] for start, stop in pairwise([*firsts, len(places)])]
        mark = self._processor.placeholder_id
        return [mark if is_picture(token) else token for token in ids], [self._feature(ids, part) for part in parts]

    def _feature(self, ids: Sequence[int], places: Sequence[int]) -> MultiModalFeatureSpec:
        """
        Args:
            places: of the picture's rows.
        """
        first, last = places[0], places[-1]
        item, own = self._item(key_of(ids[first]))
        if [ids[place] for place in places] != own:
            raise UserError(
                "a picture takes other places in the prompt than in vLLM's environment",
                found=f"{len(places)} tokens for picture {key_of(ids[first]):012x}, {len(own)} there",
                remedy="use the same version of transformers in both environments, and prompts that are not cut",
            )
        shown = torch.zeros(last - first + 1, dtype=torch.bool)
        shown[torch.tensor(places) - first] = True
        position = PlaceholderRange(first, len(shown), None if bool(shown.all()) else shown)
        name = f"{key_of(ids[first]):012x}"
        return MultiModalFeatureSpec(item, "image", name, position, mm_hash=name)

    def _read(self, key: int) -> tuple[MultiModalKwargsItem, list[int]]:
        """Returns what the tower takes of a picture, and the ids of its places."""
        picture = self._store.get(key)
        found = BatchFeature(
            {
                name: value.to(self._dtype) if value.is_floating_point() else value
                for name, value in self._processor.inputs(picture).items()
            }
        )
        items = MultiModalKwargsItems.from_hf_inputs(found, self._fields(found, {}))["image"]
        return items[0], list(chain.from_iterable(self._processor.placed(picture).ids()))
