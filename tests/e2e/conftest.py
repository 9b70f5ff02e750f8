"""A tiny world: random models of the quickstart's vocabulary, data files, recipes, and two ways to run a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from quartet.cli import main as cli_module
from quartet.extras.quickstart import task
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.rollouts import list_rollout_steps, rollouts_path
from quartet.observe.trackers import read_metrics

REWARDS = '''
def digits(completions, **_):
    """Share of characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def shortness(prompts, completions, **_):
    return [-len(text) / 10 for text in completions]
'''
TIMES = ("memory/", "throughput/", "time/", "rollout/tokens_per_s", "overlap/", "handover/", "time_s")
"""Prefixes of figures that measure seconds, or what moved where: the only ones that may differ between equal runs."""


@pytest.fixture(autouse=True)
def one_thread_here() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def expect_user_error(self, *parts: str) -> None:
        """Exit status 2, three parts, no traceback, and every one of ``parts`` in the message."""
        assert self.status == 2, (self.status, self.err)
        assert "Traceback" not in self.err + self.out
        lines = self.err.strip().splitlines()
        assert lines[0].startswith("error: "), self.err
        assert any("found" in line for line in lines[1:]), self.err
        for part in parts:
            assert part in self.err, (part, self.err)


def tiny_config(**changes: Any) -> Qwen2Config:
    tokenizer = build_tokenizer()
    values = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    return Qwen2Config(**{**values, **changes})


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class World:
    """A working directory with ``model/``, ``reward_model/``, data files and ``rewards.py``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tokenizer = build_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Qwen2ForCausalLM(tiny_config()).save_pretrained(path / "model")
            Qwen2ForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(path / "reward_model")
        for name in ("model", "reward_model"):
            tokenizer.save_pretrained(path / name)
        write_rows(path / "demonstrations.jsonl", task.toy_demonstrations(0, 64))
        prompts = task.toy_prompts(0, 24)
        write_rows(path / "prompts.jsonl", [{"prompt": p, "answer": str(eval(p[:-1]))} for p in prompts])
        write_rows(path / "held_out.jsonl", [{"prompt": p} for p in task.toy_prompts(0, 4, "held_out")])
        pairs = [
            {"prompt": p, "chosen": task.work(*task.operands(p)), "rejected": task.work(*task.operands(p), "forgetful")}
            for p in prompts
        ]
        write_rows(path / "pairs.jsonl", pairs)
        (path / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def recipe(self, name: str, content: Mapping[str, Any]) -> str:
        """Writes ``name.yaml``; its path relative to the world."""
        (self.path / f"{name}.yaml").write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
        return f"{name}.yaml"


def sft_recipe(**changes: Any) -> dict[str, Any]:
    return {
        "threads": 1,
        "model": {"path": "model"},
        "data": {"path": "demonstrations.jsonl"},
        "train": {"optim": {"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine"}, "token_budget": 256},
        "steps": 6,
        "examples_per_step": 12,
        "checkpoint": {"every_steps": 2},
        **changes,
    }


def reward_model_recipe(**changes: Any) -> dict[str, Any]:
    return {
        "threads": 1,
        "model": {"path": "model"},
        "data": {"path": "pairs.jsonl"},
        "evaluation_data": {"path": "pairs.jsonl", "limit": 8},
        "evaluate_every_steps": 2,
        "train": {"optim": {"lr": 3e-3}},
        "steps": 6,
        "pairs_per_step": 8,
        "checkpoint": {"every_steps": 2},
        **changes,
    }


def rl_recipe(algorithm: str = "ppo", **changes: Any) -> dict[str, Any]:
    """PPO reads everything there is: reward model, function, adaptive KL, critic warm-up, epochs, evaluation."""
    common = {
        "threads": 1,
        "actor": {"model": {"path": "model"}, "train": {"optim": {"lr": 3e-3}, "token_budget": 128}},
        "algorithm": {"name": algorithm},
        "data": {"path": "prompts.jsonl"},
        "rollout": {
            "sampling": {"max_new_tokens": 7},
            "engine": {"type": "native", "max_running": 4, "steps_per_lease": 3},
        },
        "rewards": [{"type": "function", "target": "rewards.py:digits"}],
        "steps": 5,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        "minibatches": 2,
        "chunk_size": 1,
        "checkpoint": {"every_steps": 2},
    }
    if algorithm == "ppo":
        common |= {
            "algorithm": {"name": "ppo", "kl": {"coef": 0.05, "target": 0.5, "horizon": 50}},
            "critic": {"warmup_steps": 1, "train": {"optim": {"lr": 3e-3}}},
            "epochs": 2,
            "rewards": [
                {"type": "model", "path": "reward_model"},
                {"type": "function", "target": "rewards.py:digits", "weight": 2.0},
            ],
            "evaluation": {
                "data": {"path": "held_out.jsonl"},
                "every_steps": 3,
                "sampling": {"temperature": 0.0, "max_new_tokens": 20},
            },
        }
    return {**common, **changes}


@pytest.fixture(scope="session")
def recipes() -> dict[str, Callable[..., dict[str, Any]]]:
    return {"sft": sft_recipe, "reward-model": reward_model_recipe, "rl": rl_recipe}


@pytest.fixture(scope="session")
def read_by_workers(world_of_session: World) -> dict[str, Any]:
    """Sections of a PPO recipe whose texts are tokenised where they are needed: demonstrations beside the reward, a
    reward model with another tokenizer (its digits have each other's ids), and a process reward model."""
    other = world_of_session.path / "other_tokenizer"
    if not other.exists():
        build_tokenizer().save_pretrained(other)
        content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        vocabulary.update({str(n): vocabulary[str(9 - n)] for n in range(10)})
        (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return {
        "ptx": {"data": {"path": "demonstrations.jsonl"}, "coef": 0.5, "examples_per_minibatch": 3},
        "rewards": [
            {"type": "model", "path": "reward_model"},
            {"type": "model", "path": "reward_model", "tokenizer": "other_tokenizer", "name": "foreign", "weight": 0.5},
            {"type": "process_model", "path": "reward_model", "separator": "1", "weight": 0.5},
            {"type": "function", "target": "rewards.py:digits", "weight": 2.0},
        ],
    }


@pytest.fixture(scope="session")
def world_of_session(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def learning_heads(world_of_session: World) -> dict[str, Any]:
    """``rollout.speculation`` with heads of ``model/``, not trained before, which learn along."""
    packed = PackedCausalLM(load_causal_lm(str(world_of_session.path / "model")))
    MedusaHeads(packed, 2, shared_head=False).save(world_of_session.path / "heads")
    return {
        "type": "medusa",
        "path": "heads",
        "costs": {"plain": [1.0, 1.01, 1.02], "drafted": [1.0, 1.0, 1.01, 1.05, 1.15]},
        "train": {"tokens_per_step": 40, "optim": {"lr": 1e-2}},
    }


@pytest.fixture
def world(world_of_session: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The shared world as current directory. Tests write under names of their own."""
    monkeypatch.chdir(world_of_session.path)
    return world_of_session


@pytest.fixture
def quartet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command in this process, through the entry point that users call."""

    def run(*argv: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["quartet", *map(str, argv)])
        capsys.readouterr()
        status = 0
        try:
            cli_module.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


class Processes:
    """Commands in processes of their own; see ``fork_server.py``."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _ask(self, request: Mapping[str, Any]) -> dict[str, int]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, int] = json.loads(self._server.stdout.readline())
        return answer

    def start(
        self,
        *argv: object,
        cwd: Path,
        output: Path,
        kill: tuple[str, int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        words = [str(a) for a in argv]
        command = {"argv": words, "cwd": str(cwd), "output": str(output), "kill": kill, "env": dict(env or {})}
        return self._ask(command)["pid"]

    def wait(self, pid: int) -> int:
        """Exit status, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(self._ask({"wait": pid})["status"])

    def run(self, *argv: object, **options: Any) -> int:
        return self.wait(self.start(*argv, **options))

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


def figures(run: Path) -> list[dict[str, float]]:
    """The rows of metrics, without those figures that measure seconds."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def results(run: Path) -> list[dict[str, float]]:
    """As ``figures``, without how much work they took: a resumed run does not find the canary's prompt in the cache,
    nor a process the pictures that another one looked at."""
    work = ("rollout/prefill_tokens", "pictures/computed")
    return [{k: v for k, v in row.items() if k not in work} for row in figures(run)]


def weights(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = sorted(run.glob("*/model.safetensors"))
    assert found, f"no model in {run}"
    return {path.parent.name: load_file(path) for path in found}


def check_same_run(one: Path, other: Path) -> None:
    """Weights bit for bit, metrics apart from times with every step once, rollouts byte for byte."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for model in left:
        assert left[model].keys() == right[model].keys()
        for name in left[model]:
            assert torch.equal(left[model][name], right[model][name]), (model, name)
    steps = [row["step"] for row in figures(other)]
    assert steps == sorted(set(steps)), steps
    assert results(one) == results(other)
    assert list_rollout_steps(one / "rollouts") == list_rollout_steps(other / "rollouts")
    for step in list_rollout_steps(one / "rollouts"):
        assert (
            rollouts_path(one / "rollouts", step).read_bytes() == rollouts_path(other / "rollouts", step).read_bytes()
        ), step
    assert json.loads((other / "run.json").read_text())["status"] == "done"


@pytest.fixture(scope="session")
def same_run() -> Callable[[Path, Path], None]:
    return check_same_run


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[Path], list[dict[str, float]]]:
    return figures
