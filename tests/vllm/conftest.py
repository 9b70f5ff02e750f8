"""Engines of vLLM in its own environment, ``.venv-vllm``, which ``make test-vllm`` makes.

The model is the real stories model where the folder of real data is named, else a small random one; a group's prompt is
long enough to be cached. One model at a time is loaded twice: here by transformers, and in the engine.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quartet.config.plugins import plugin_entries
from quartet.extras.speculation.heads import MedusaHeads
from quartet.rollout.process import EngineProcess, EngineSpec
from quartet.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.weights.sink import write_weights

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
VOCAB = 512
PROMPT = tuple(3 + 7 * i % (VOCAB - 3) for i in range(70))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not PYTHON.exists():
                item.add_marker(
                    pytest.mark.skip(reason=f"no environment {PYTHON.parents[1].name}: make test-vllm makes it")
                )


def saved_model(folder: Path, *, tied: bool = True, head_size: int = 8, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=head_size, max_position_embeddings=512, initializer_range=0.15,
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@dataclass
class Sides:
    """The same policy on both sides: in engines, and as transformers computes it."""

    path: Path
    model: Any
    staging: StagedWeights
    engines: list[EngineProcess]
    router: Router
    sent: dict[str, torch.Tensor]
    changed: Callable[[], object] = lambda: None
    heads: MedusaHeads | None = None
    version: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def requests(self, number: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[Request]:
        group = f"g{next(self._numbers)}"
        wanted = {"max_new_tokens": 16, **sampling}
        return [
            Request(f"{group}-{i}", group, tuple(prompt), SamplingParams(**{"seed": i, **wanted}))
            for i in range(number)
        ]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.router.submit(requests)
        return collect(self.router, requests)

    @torch.no_grad()
    def change(self, size: float = 0.02) -> None:
        """Moves every weight that is sent, and sends them."""
        for parameter in self.sent.values():
            parameter.add_(size * torch.randn_like(parameter))
        self.changed()
        self.send()

    def send(self) -> None:
        self.version += 1
        self.router.pause()
        write_weights(self.router.weight_sink(), self.sent.items(), self.version)
        self.router.resume()

    @torch.no_grad()
    def error(self, completions: Sequence[Completion], requests: Sequence[Request]) -> float:
        """The largest difference of a log-probability from transformers'."""
        worst = 0.0
        for completion, request in zip(completions, requests, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            scores = self.model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)
            found = torch.log_softmax(scores, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            worst = max(worst, (found - torch.tensor(completion.logprobs)).abs().max().item())
        return worst


def collect(engine: RolloutEngine, requests: Sequence[Request], timeout_s: float = 120.0) -> list[Completion]:
    """Completions in the order of their requests."""
    found: dict[str, Completion] = {}
    rounds = 0
    while len(found) < len(requests):
        for completion in engine.completed(1.0):
            assert completion.request_id not in found, "answered twice"
            found[completion.request_id] = completion
        rounds += 1
        assert rounds < 10_000
    return [found[request.request_id] for request in requests]


def spec(path: Path, name: str = "vllm-0", **kwargs: Any) -> EngineSpec:
    return EngineSpec(
        "quartet.rollout.vllm.start:make_vllm_engine",
        {"path": str(path), "dtype": "float32", "enforce_eager": True, "cache_bytes": 1 << 26, **kwargs},
        python=str(PYTHON),
        environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        name=name,
    )


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    return saved_model


@pytest.fixture(scope="session")
def engine_spec() -> Callable[..., EngineSpec]:
    return spec


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sides]]:
    """Engines over a model, with its weights sent once; they end with the session."""
    started: list[Sides] = []

    def start(
        number: int = 1,
        *,
        path: Path | None = None,
        tied: bool = True,
        sent: dict[str, torch.Tensor] | None = None,
        heads: Callable[[Any], MedusaHeads] | None = None,
        loads: Any = AutoModelForCausalLM,
        **kwargs: Any,
    ) -> Sides:
        if "speculation" in kwargs:
            section = kwargs.pop("speculation")
            kwargs["drafter"] = plugin_entries("drafters")[section["type"]].vllm, section
        path = path or saved_model(tmp_path_factory.mktemp("model"), tied=tied)
        model = loads.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        drafting = None if heads is None else heads(model)
        if drafting is not None:
            drafting.save(folder := tmp_path_factory.mktemp("heads"))
            section = {"type": "medusa", "path": str(folder), "depth": None, "train": {}}
            kwargs["drafter"] = plugin_entries("drafters")["medusa"].vllm, section
            sent = {**dict(model.named_parameters()), **dict(drafting.weights())}
        staging = StagedWeights((sent or dict(model.named_parameters(remove_duplicate=False))).items())
        made = [spec(path, f"vllm-{i}", version=None, max_num_seqs=8, **kwargs) for i in range(number)]
        engines = [EngineProcess(each, staging) for each in made]
        named = sent or dict(model.named_parameters())
        started.append(Sides(path, model, staging, engines, Router(engines), named, heads=drafting))
        started[-1].send()
        return started[-1]

    yield start
    for sides in started:
        sides.router.close()
        sides.staging.close()


@pytest.fixture(scope="session")
def stories() -> Path:
    """The real stories model, whose heads have 8 numbers."""
    folder = os.environ.get("QUARTET_REALDATA")
    if folder is None:
        pytest.skip("QUARTET_REALDATA names no folder")
    return Path(folder) / "stories260K"
