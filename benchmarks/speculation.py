"""Tokens per second of the native engine with drafts, as a ratio to plain decoding in the same run.

    python benchmarks/trained_model.py --data gsm8k_train.jsonl --out runs/trained
    python benchmarks/speculation.py --model runs/trained --data gsm8k_train.jsonl --out runs/speculation

Trains Medusa heads for the model on its own answers (once; they stay in ``--out``), then lets the sides take turns over
the same held-out questions, with other seeds each time: a table by rows that run together, and one rollout whose
lengths span two orders of magnitude. Beside them the floor: what a step takes, what reading the weights once takes at
the bandwidth that this machine has, and tokens per forward. ``forced`` sides (at the first number of rows) draft at
every step, whether it pays or not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from trained_model import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.config.common import DataConfig, ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import BaseSpeculationConfig
from quartet.extras.speculation.config import (
    HeadsConfig,
    HistorySpeculation,
    MedusaRecipe,
    MedusaSpeculation,
    StepCosts,
)
from quartet.extras.speculation.job import MedusaTrainer
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.memory import describe_processor
from quartet.rollout.drafter import make_drafter
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams

DEPTH = 4
ALWAYS = StepCosts(plain=(1.0, 1.0), drafted=(1e-3, 1e-3), drafting=(0.0,))
"""By which drafting always pays, and whole drafts pay most."""


def tree(depth: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Paths of which the product of 1 + rank is ``most`` at most."""
    paths = (path for num in range(1, depth + 1) for path in product(range(most), repeat=num))
    return tuple(path for path in paths if math.prod(1 + rank for rank in path) <= most)


def trained_heads(model: Path, data: Path, out: Path, sampling: SamplingConfig, prompts: int, epochs: int) -> Path:
    """On the model's own answers to questions that it was trained on."""
    path = out / f"heads_{sampling.temperature:g}"
    if not (path / "medusa").is_dir():
        questions = out / "questions.jsonl"
        rows = rows_of(data, held_out=False)[:prompts]
        questions.write_text("".join(json.dumps({"prompt": row.question + "\n"}) + "\n" for row in rows), "utf-8")
        recipe = MedusaRecipe(
            output_dir=str(path),
            model=ModelConfig(path=str(model)),
            data=DataConfig(path=str(questions)),
            sampling=sampling,
            heads=HeadsConfig(depth=DEPTH, layers=2),
            train=TrainConfig(optim=OptimConfig(lr=1e-3, warmup_steps=10, schedule="cosine"), precision="bf16"),
            epochs=epochs,
        )
        MedusaTrainer(recipe).train()
    return path / "medusa"


@dataclass
class Side:
    engine: NativeEngine
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    forwards: float = 0.0
    steps: int = 0

    def turn(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        """Answers all of them; one turn counts."""
        before, began = self.engine.stats(), time.perf_counter()
        self.engine.submit(requests)
        done = {}
        while self.engine.has_work:
            done |= {completion.request_id: completion.token_ids for completion in self.engine.step()}
        self.seconds.append(time.perf_counter() - began)
        after = self.engine.stats()
        self.tokens = after.generated_tokens - before.generated_tokens
        self.steps = after.num_steps - before.num_steps
        self.forwards = (self.tokens - len(requests)) / (after.num_row_steps - before.num_row_steps)
        self.engine.update_weights(None, after.policy_version + 1)
        return done


def sides_of(model: Path, heads: Path, rows: int, *, forced: bool) -> dict[str, Side]:
    trunk = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    packed = PackedCausalLM(trunk, "fp32")
    configs: dict[str, BaseSpeculationConfig | None] = {
        "plain": None,
        "history": HistorySpeculation(),
        "chain": MedusaSpeculation(path=str(heads)),
        "tree": MedusaSpeculation(path=str(heads), tree=tree(3, 6)),
    }
    for depth in range(1, DEPTH + 1) if forced else ():
        configs[f"chain of {depth}, forced"] = MedusaSpeculation(path=str(heads), depth=depth, costs=ALWAYS)
    for depth, most in ((2, 3), (2, 6), (3, 4)) if forced else ():
        nodes = tree(depth, most)
        name = f"tree of {len(nodes)} to depth {depth}, forced"
        configs[name] = MedusaSpeculation(path=str(heads), tree=nodes, costs=ALWAYS)
    found = {}
    for name, config in configs.items():
        found[name] = Side(NativeEngine(packed, max_running=rows, drafter=make_drafter(config, packed)))
    return found


@dataclass(frozen=True)
class Job:
    """What is asked in every turn, each time with other seeds.

    Attributes:
        prompts, lengths: of each answer; equal prompts are a group.
    """

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    sampling: SamplingConfig

    def requests(self, turn: int) -> list[Request]:
        groups: dict[tuple[int, ...], str] = {}
        made, how = [], {"temperature": self.sampling.temperature, "draw": self.sampling.draw}
        for i, (prompt, num) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            group = groups.setdefault(tuple(prompt), str(i))
            seed = turn * len(self.prompts) + i
            made.append(Request(str(i), group, tuple(prompt), SamplingParams(max_new_tokens=num, seed=seed, **how)))
        return made


@torch.no_grad()
def entropy_of_answers(model: Path, job: Job) -> float:
    """Nats per token of the distributions that plain decoding draws from, a mean over its own answers."""
    sampler, trunk = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
    side = Side(NativeEngine(PackedCausalLM(sampler, "fp32"), max_running=len(job.prompts)))
    requests, total, num = job.requests(0), 0.0, 0
    for i, tokens in side.turn(requests).items():
        prompt = requests[int(i)].prompt_ids
        logits = trunk(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / job.sampling.temperature).log_softmax(-1)
        total -= float((logprobs.exp() * logprobs).sum())
        num += len(tokens)
    return total / num


def bytes_per_second() -> float:
    """Of reading memory, by a sum over more than any cache holds."""
    numbers = torch.ones(64 * 2**20)
    numbers.sum()
    found = []
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        found.append(numbers.numel() * 4 / (time.perf_counter() - began))
    return max(found)


def measure(sides: Mapping[str, Side], job: Job, repeats: int, floor_s: float) -> tuple[list[str], float]:
    """Table rows, and the largest share of answers in which a side differs from plain decoding."""
    plain = sides["plain"]
    differ = dict.fromkeys(sides, 0)
    for turn in range(1 + repeats):
        requests, expected = job.requests(turn), {}
        for name, side in sides.items():
            found = side.turn(requests)
            expected = expected or found
            differ[name] += sum(tokens != expected[i] for i, tokens in found.items())
    for side in sides.values():
        del side.seconds[0]
    rows = []
    for name, side in sides.items():
        ratios = [one / other for one, other in zip(plain.seconds, side.seconds, strict=True)]
        seconds = statistics.median(side.seconds)
        cells = [
            name,
            f"{side.tokens / seconds:.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{side.forwards:.2f}",
            f"{1e3 * seconds / side.steps:.1f}",
            f"{1e3 * floor_s:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows, max(differ.values()) / ((1 + repeats) * len(job.prompts))


HEAD = "| drafts | tokens/s | against plain | tokens per forward | ms per step | ms to read the weights |"


def report(title: str, sides: Mapping[str, Side], job: Job, repeats: int, floor_s: float) -> None:
    rows, differ = measure(sides, job, repeats, floor_s)
    lines = [f"\n{title}\n", HEAD, "|---|---|---|---|---|---|", *rows]
    lines.append(f"\n{100 * differ:.1f} % of answers at most differ from plain decoding's, by rounding.\n")
    sys.stdout.write("\n".join(lines))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer in the table by rows")
    parser.add_argument(
        "--rollout", type=int, default=32, help="answers of the whole rollout, four to a prompt; 0: none"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draw", choices=("inverse", "gumbel"), default="gumbel")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-prompts", type=int, default=1200, help="answered to train the heads")
    parser.add_argument("--epochs", type=int, default=3, help="of the heads over these answers")
    parser.add_argument("--only-heads", action="store_true", help="train them, and measure another time")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sampling = SamplingConfig(max_new_tokens=96, temperature=arguments.temperature, draw=arguments.draw)
    asked = arguments.train_prompts, arguments.epochs
    heads = trained_heads(arguments.model, arguments.data, arguments.out, sampling, *asked)
    if arguments.only_heads:
        return
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    held_out = rows_of(arguments.data, held_out=True)
    prompts = [tokenizer(row.question + "\n")["input_ids"] for row in held_out]
    num_bytes = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(arguments.model).parameters())
    bandwidth = bytes_per_second()
    floor_s = num_bytes / bandwidth
    entropy = json.loads((arguments.model / "entropy.json").read_text(encoding="utf-8"))
    machine = describe_processor()
    sampled = Job(prompts[:32], [arguments.tokens] * 32, sampling)
    sys.stdout.write(
        f"{machine['name']}, {machine['units'][-1]}, {arguments.threads} threads; {num_bytes / 1e6:.0f} MB of weights, "
        f"{bandwidth / 1e9:.1f} GB/s; on data {entropy}; temperature {arguments.temperature:g}, at which answers have "
        f"an entropy of {entropy_of_answers(arguments.model, sampled):.2f} nats a token; draw {arguments.draw}\n"
    )
    for rows in arguments.rows:
        sides = sides_of(arguments.model, heads, rows, forced=rows == arguments.rows[0])
        job = Job(prompts[:rows], [arguments.tokens] * rows, sampling)
        report(f"{rows} rows", sides, job, arguments.repeats, floor_s)
    if arguments.rollout:
        draw = random.Random(0)
        lengths = [round(8 * 100 ** draw.random()) for _ in range(arguments.rollout)]
        sides = sides_of(arguments.model, heads, 32, forced=False)
        title = f"a rollout of {len(lengths)} answers, {min(lengths)} to {max(lengths)} tokens, 32 at a time"
        asked = [prompt for prompt in prompts[: len(lengths) // 4] for _ in range(4)]
        report(title, sides, Job(asked, lengths, sampling), arguments.repeats, floor_s)


if __name__ == "__main__":
    main()
