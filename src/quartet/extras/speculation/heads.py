"""Medusa heads: guesses of the tokens that follow the next one, from the trunk's hidden state (Cai et al. 2024).

Shapes: B rows, M rows that are trained on, D hidden, V vocabulary, K depth.

Head ``k``, from 0, guesses the token ``2 + k`` places behind the hidden state's own, since the trunk's head has the
next one::

    logits_k(h) = head_k(h + silu(W_k h)),    W_k = 0 at first, so that every head begins as the trunk's

with several layers ``h + silu(W h)`` as often, each with a ``W`` of its own.

``head_k`` is the trunk's LM head, or a copy of it that learns. The trunk gets no gradient: its hidden states and its
head are detached here.

A directory of heads is one of vLLM's Medusa, ``config.json`` and ``model.safetensors`` with its names, and says besides
which trunk they were trained on.

What vLLM drafts with: its n-grams for ``history``, its Medusa for heads of ours.

vLLM's Medusa wants an LM head in the heads' files and keeps it as it was. Heads that share the trunk's are given that
of the model that serves instead (``WorkerMethods.quartet_replace_sampler``): the file has zeros of a byte each for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quartet.config import UserError
from quartet.extras.speculation.config import FOLDER, PREFIX
from quartet.models.directories import WHOLE, save_tensors
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.vllm.start import DraftSettings
from quartet.text.loading import resolve_model_directory
from quartet.weights.sink import gather

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


class ResidualBlock(nn.Module):
    """``x + silu(W x)``, layer after layer, as the published heads have it; names as in vLLM."""

    def __init__(self, hidden_size: int, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        shape = hidden_size, hidden_size
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False, device=device, dtype=dtype) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[…, D] → […, D]``."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """Heads of a trunk, which is not among their parameters.

    Args:
        trunk: whose hidden states they read, in its precision; with ``shared_head`` its LM head as it is at the time.
        depth: number of heads.
        layers: of each head's residual block.
        shared_head: all heads end in the trunk's LM head; else each has a copy of its own, which learns too.

    Raises:
        UserError: the trunk's head is not a plain linear layer.
    """

    def __init__(self, trunk: PackedCausalLM, depth: int, *, layers: int = 1, shared_head: bool = True) -> None:
        super().__init__()
        head = trunk.head
        if type(head) is not nn.Linear:
            raise UserError(
                f"Medusa heads need a trunk with a linear LM head, which {type(trunk.model).__name__} has not",
                found=f"its head is a {type(head).__name__}",
                remedy="draft from history: rollout.speculation.type: history",
            )
        self.trunk = trunk
        self.depth, self.layers = depth, layers
        self.hidden_size, self.vocab_size = head.in_features, head.out_features
        dtype = torch.float64 if head.weight.dtype == torch.float64 else torch.float32
        block = partial(ResidualBlock, self.hidden_size, layers, trunk.device, dtype)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.lm_heads: nn.ModuleList | None = None
        self._whole_head: tuple[Tensor, Tensor | None] | None = None
        if not shared_head:
            shape = self.hidden_size, self.vocab_size, head.bias is not None
            self.lm_heads = nn.ModuleList([nn.Linear(*shape, trunk.device, dtype) for _ in range(depth)])
            whole = {name: gather(tensor, everywhere=True) for name, tensor in head.state_dict().items()}
            for own in self.lm_heads:
                own.load_state_dict(whole)

    @torch.no_grad()
    def forward(self, hidden: Tensor, depth: int | None = None) -> Tensor:
        """Computes ``[B, D] → [B, K, V]`` logits in fp32 (fp64 stays), no gradients; of the first ``depth`` heads, or
        all.
        """
        with self.trunk.autocast():
            states = torch.stack([block(hidden) for block in self.blocks[:depth]])
            if self.lm_heads is None:
                # One product for all heads, and in an engine's step by its own form of the weight.
                logits = self.trunk.head(states.flatten(0, 1)).unflatten(0, states.shape[:2])
            else:
                logits = torch.stack([F.linear(x, *self._head(k)) for k, x in enumerate(states)])
        return self.trunk.scaled(logits).transpose(0, 1)

    def logits_of(self, k: int, hidden: Tensor) -> Tensor:
        """Computes ``[M, D] → [M, V]`` logits of head ``k``, with gradients for the heads alone."""
        with self.trunk.autocast():
            return self.trunk.scaled(F.linear(self.blocks[k](hidden.detach()), *self._head(k)))

    @contextmanager
    def with_whole_head(self) -> Iterator[None]:
        """Gathers the LM head of a sharded trunk for the ``with`` block, where the heads share it. Collective."""
        if self.lm_heads is None:
            weight, bias = (None if t is None else gather(t, everywhere=True) for t in self._head(0))
            assert weight is not None, "every rank gets it"
            self._whole_head = weight, bias
        try:
            yield
        finally:
            self._whole_head = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights named as they travel beside the trunk's."""
        return ((PREFIX + name, parameter.detach()) for name, parameter in self.named_parameters())

    def _head(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Returns the weight ``[V, D]`` and bias of head ``k``."""
        if self._whole_head is not None:
            return self._whole_head
        head = self.trunk.head if self.lm_heads is None else self.lm_heads[k]
        assert isinstance(head, nn.Linear), "looked at when the heads were made"
        if self.lm_heads is not None:
            return head.weight, head.bias
        return head.weight.detach(), None if head.bias is None else head.bias.detach()

    def save(self, path: Path) -> None:
        """Writes a directory that ``load`` reads, and vLLM where the heads have LM heads of their own. Collective where
        the trunk is sharded: its first rank writes.

        Raises:
            OSError: it could not be written.
        """
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "dtype": "float32",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": False,
            "original_lm_head": self.lm_heads is None,
            "logit_scale": self.trunk.logit_scale,
            "trunk": str(self.trunk.model.name_or_path),
        }
        if not self.trunk.gather.is_first:
            return
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / _WEIGHTS, self.state_dict(), WHOLE)
        (path / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, trunk: PackedCausalLM, depth: int | None = None) -> MedusaHeads:
        """Loads the first ``depth`` heads of those saved at ``path``; all where it is None. On the meta device they
        have no contents.

        Args:
            path: a directory, its URL, or a name on the hub, of which the files are brought to this machine.

        Raises:
            UserError: there are none, they cannot be read, are fewer, or of another trunk.
        """
        path = Path(resolve_model_directory(path, "heads", FOLDER))
        try:
            config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
            sizes = config["hidden_size"], config["vocab_size"]
            if sizes != (trunk.head.in_features, trunk.head.out_features):
                raise UserError(
                    "the Medusa heads were trained on another model",
                    found=f"hidden size and vocabulary {sizes} in {path} of {config['trunk']!r}, here {trunk.head}",
                    remedy="name the heads of this model, or train some by quartet medusa",
                )
            shape = {"layers": config["num_hidden_layers"], "shared_head": config["original_lm_head"]}
            heads = cls(trunk, depth or config["num_heads"], **shape)
            if trunk.device.type != "meta":
                with safe_open(str(path / _WEIGHTS), "pt") as file:
                    heads.load_state_dict({name: file.get_tensor(name) for name in heads.state_dict()})
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
            raise UserError(
                f"the Medusa heads cannot be read: {path}",
                found=f"{type(error).__name__}: {error}".partition("\n")[0],
                remedy="name a directory that quartet medusa has written, and no more heads (depth, tree) than it has",
            ) from error
        return heads


_LONGEST_MATCH = 16
"""Newest tokens that are looked up at most; of the places that have them the one that has most is taken."""


def vllm_ngrams(section: Mapping[str, Any], folder: Path) -> DraftSettings:
    shortest = section["min_match"]
    lookup = {"prompt_lookup_min": shortest, "prompt_lookup_max": max(shortest, _LONGEST_MATCH)}
    return DraftSettings({"method": "ngram", "num_speculative_tokens": section["max_draft"], **lookup})


def vllm_medusa(section: Mapping[str, Any], folder: Path) -> DraftSettings:
    """Writes the first heads that ``MedusaHeads.save`` wrote, or all, for vLLM."""
    path, learn = Path(resolve_model_directory(section["path"], "heads", FOLDER)), section["train"] is not None
    config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    depth = config["num_heads"] = section["depth"] or config["num_heads"]
    with safe_open(path / _WEIGHTS, "pt") as file:
        names = [name for name in file.keys() if name.split(".")[1] in map(str, range(depth))]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    shapes = {PREFIX + name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if config["original_lm_head"]:
        tensors["lm_head.weight"] = torch.zeros(config["vocab_size"], config["hidden_size"], dtype=torch.uint8)
    (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / _WEIGHTS)
    drafted = {"method": "medusa", "model": str(folder), "num_speculative_tokens": depth}
    return DraftSettings(drafted, shapes if learn else {}, not learn)
