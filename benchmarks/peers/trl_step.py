"""Whole steps of TRL's GRPO or RLOO trainer on 8 prompts x 8 completions of given lengths.

Random models end their responses anywhere, so lengths are forced: a logits processor forbids the end of text until a
row has its length, then allows nothing else. Every completion thus has the length that our side gives the same
request; the end-of-text token is its last. One optimizer update per step on all completions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from turns import Turns

turns = Turns()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

FOREVER = 10_000


class ForcedLengths(LogitsProcessor):
    """Row i ends with its ``lengths[i]``-th token. In place, so that it costs next to nothing."""

    def __init__(self, lengths: list[int], prompt_length: int, eos: int) -> None:
        self.lengths, self.prompt_length, self.eos = torch.tensor(lengths), prompt_length, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = float("-inf")
        last = self.lengths == input_ids.shape[1] - self.prompt_length + 1
        if last.any():
            scores[last] = float("-inf")
            scores[last, self.eos] = 0.0
        return scores


class Clock:
    """Seconds spent in parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, method: str, name: Callable[[], str] | str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            label = name if isinstance(name, str) else name()
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begun

        setattr(owner, method, timed)

    def read(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {}
        return found


class StepByStep(TrainerCallback):
    """Measures from one step's beginning to its end; between steps it waits to be asked."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.begun, self.lengths = clock, 0.0, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, phases = time.perf_counter() - self.begun, self.clock.read()
        if state.global_step == job["warm_up"]:
            turns.report()
        elif state.global_step > job["warm_up"]:
            if sorted(self.lengths) != sorted(job["lengths"]):
                raise RuntimeError(f"completions of other lengths than wanted: {sorted(self.lengths)}")
            turns.report(seconds=seconds, tokens=sum(self.lengths), phases=phases)
        if state.global_step >= job["warm_up"] and not turns.wait():
            control.should_training_stop = True
        self.begun = time.perf_counter()


job = turns.job
torch.set_num_threads(job["threads"])
tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
group_size = len(job["lengths"]) // len(job["prompts"])
rows = Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]])
common = {
    "output_dir": tempfile.mkdtemp(),
    "per_device_train_batch_size": job["micro_batch"],
    "gradient_accumulation_steps": len(job["lengths"]) // job["micro_batch"],
    "num_generations": group_size,
    "max_completion_length": max(job["lengths"]),
    "shuffle_dataset": False,
    "gradient_checkpointing": job["checkpointing"],
    "bf16": job["dtype"] == "bfloat16",
    "use_cpu": True,
    "max_steps": FOREVER,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "logging_steps": FOREVER,
    "report_to": "none",
    "disable_tqdm": True,
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


if job["algorithm"] == "grpo":
    trainer = GRPOTrainer(model, reward, args=GRPOConfig(**common), train_dataset=rows, processing_class=tokenizer)
else:
    trainer = RLOOTrainer(model, reward, args=RLOOConfig(**common), train_dataset=rows, processing_class=tokenizer)
clock = Clock()
step = StepByStep(clock)
trainer.add_callback(step)


def force_lengths(owner: Any) -> None:
    """Hands the processor to every ``generate`` and notes how long the completions became."""
    inner = owner.generate

    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        forced = ForcedLengths(job["lengths"], input_ids.shape[1], tokenizer.eos_token_id)
        out = inner(input_ids=input_ids, logits_processor=[forced], **kwargs)
        completions = out[:, input_ids.shape[1] :]
        # Up to the forced end: the random model may well have sampled the padding token on the way.
        step.lengths = ((completions == tokenizer.eos_token_id).int().argmax(1) + 1).tolist()
        return out

    owner.generate = generate


force_lengths(trainer.model)
clock.around(trainer.model, "generate", "generate")
clock.around(
    trainer, "_get_per_token_logps_and_entropies", lambda: "forward" if torch.is_grad_enabled() else "score"
)  # fmt: skip
clock.around(trainer.accelerator, "backward", "backward")
trainer.train()
