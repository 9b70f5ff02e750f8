"""Bytes that one decoder layer keeps for its backward pass, by ``activation_checkpointing``.

    python benchmarks/recomputation.py [--width 3584] [--inner 18944] [--tokens 128]

A Qwen2-like layer with the shapes of a model of 7 billion weights in the trainer's own forward, ``precision: bf16``.
Counted are the tensors that live after a forward: of two layers less those of one, so that what is around the layers is
out; of twice as many tokens less those of as many, so that bf16 copies of weights are (shards are gathered in bf16, and
have none).
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from common import arguments, markdown, write_results
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM, Recomputation
from quartet.train.forward import ForwardNeeds, forward_packed

WAYS: tuple[Recomputation, ...] = (False, "selective", True)


class Alive(TorchDispatchMode):
    """Notes every storage that an operation makes; ``bytes`` are those that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        return result

    @property
    def bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def kept(way: Recomputation, layers: int, args: Any) -> float:
    """Bytes per token that are kept by a model of so many layers."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=args.width, intermediate_size=args.inner, num_hidden_layers=layers,
        num_attention_heads=args.width // 128, num_key_value_heads=4, max_position_embeddings=2 * args.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    packed = PackedCausalLM(Qwen2ForCausalLM(config), "bf16", activation_checkpointing=way)
    found = []
    for tokens in (args.tokens, 2 * args.tokens):
        batch = RaggedBatch.from_sequences([[7] * tokens])
        # One token has a label: the head's part is small.
        batch = batch.with_token(loss_mask=torch.arange(tokens) == tokens - 1)
        with Alive() as alive:
            outputs = forward_packed(packed, batch, ForwardNeeds(logprobs=True), 1024)
        assert outputs.logprobs is not None and outputs.logprobs.requires_grad
        found.append(alive.bytes)
        del outputs
    return (found[1] - found[0]) / args.tokens


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--inner", type=int, default=18_944)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    if args.smoke:
        args.width, args.inner, args.tokens = 512, 1024, 16
    torch.set_num_threads(args.threads)
    found = {str(way).lower(): kept(way, 2, args) - kept(way, 1, args) for way in WAYS}
    write_results(args, {"width": args.width, "inner": args.inner, "bytes_per_token": found})
    rows = [[way, f"{size:,.0f}", f"{size / found['false']:.2f}"] for way, size in found.items()]
    print(markdown(["activation_checkpointing", "bytes of a layer per token", "of false"], rows))


if __name__ == "__main__":
    main()
