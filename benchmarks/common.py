"""What the benchmarks share: the two models, prompts and response lengths, the machine, results and tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODELS = ("tiny", "small")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_config(name: str) -> Qwen2Config:
    """Qwen2-style: ``tiny`` 1.8 M parameters with 512 tokens, ``small`` 27.8 M with 8192 tokens."""
    sizes = {
        "tiny": {
            "vocab_size": 512,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        "small": {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    }
    # The first ids serve as padding, beginning and end of text; no benchmark ends a response by a token.
    return Qwen2Config(max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes[name])


def build_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(model_config(name)).to(dtype).eval()


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per word ``w3`` … ``w<vocab_size - 1>``: text and token ids say the same."""
    special = ["<pad>", "<bos>", "<eos>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, vocab_size))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def saved_model(name: str, folder: Path) -> Path:
    """The random model with its tokenizer as a Hugging Face directory, the same for every side."""
    path = folder / name
    if not (path / "tokenizer.json").exists():
        model = build_model(name)
        model.save_pretrained(path)
        build_tokenizer(model.config.vocab_size).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Group:
    """A prompt's length and those of its responses, in tokens."""

    prompt: int
    responses: tuple[int, ...]


def varied_lengths(num: int, longest: int, *, shortest: int | None = None, seed: int = 0) -> list[int]:
    """``num`` lengths spread evenly from ``shortest`` (an eighth of ``longest``) to ``longest``, shuffled."""
    shortest = max(1, longest // 8) if shortest is None else shortest
    steps = max(1, num - 1)
    lengths = [round(shortest + (longest - shortest) * i / steps) for i in range(num)]
    random.Random(seed).shuffle(lengths)
    return lengths


def step_groups(
    num_prompts: int = 8, num_responses: int = 8, longest: int = 64, prompt: int | None = None
) -> list[Group]:
    """Groups of one RL step; prompts have 16 to 30 tokens unless ``prompt`` gives their length."""
    lengths = varied_lengths(num_prompts * num_responses, longest)
    return [
        Group(
            prompt if prompt is not None else 16 + 2 * (i % 8),
            tuple(lengths[i * num_responses : (i + 1) * num_responses]),
        )
        for i in range(num_prompts)
    ]


def prompt_ids(groups: Sequence[Group], vocab_size: int, *, seed: int = 1) -> list[list[int]]:
    """Random ordinary tokens, one prompt per group."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(group.prompt)] for group in groups]


# The machine, results ------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, Any]:
    """Processor, memory, versions and date: what a figure means nothing without."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    units = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f" {name}" in flags]
    return {
        "processor": model,
        "units": units,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": datetime.date.today().isoformat(),
    }


def arguments(doc: str | None, *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--smoke", action="store_true", help="a few tokens, to see that it runs; figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    return parser


def write_results(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Into the file that ``--json`` names, if any, with the machine they were measured on."""
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(args.threads), "smoke": args.smoke, **results}
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
