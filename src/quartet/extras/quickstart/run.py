"""`quartet quickstart`: SFT, reward model and PPO on a small task, end to end on a CPU, nothing downloaded.

The directory it leaves is what a user's own runs look like: data files, one run directory per stage, Hugging Face
models, ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from quartet.config import Interrupted, UserError
from quartet.config.plugins import report_writer
from quartet.extras.quickstart import recipes, task
from quartet.extras.quickstart.checker import JUDGE_ERROR_RATE, is_correct, judge_pairs
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import load_causal_lm, packed_causal_lm, save_causal_lm
from quartet.observe.files import LOCK
from quartet.observe.progress import Progress
from quartet.rollout.protocol import SamplingParams
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import generate
from quartet.trainers.evaluation_metrics import write_json_lines
from quartet.trainers.rl import RLTrainer
from quartet.trainers.run import Stopwatch, software_versions, write_json
from quartet.trainers.run_files import Resume, completed_stage, lock_run, naming_write_errors, read_json
from quartet.trainers.signals import StopSignals, signal_number, stop_signals
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

TEMPERATURES = (0.0, 0.5, 1.0)
NUM_EXAMPLES = 12


@dataclass(frozen=True)
class QuickstartResult:
    path: Path
    summary: Mapping[str, Any]


class Quickstart:
    """The three stages. Each is resumed or skipped when it is there already and ``resume`` is set.

    Args:
        seed: decides initial weights, data, sampling, everything.
        path: a new directory, or with ``resume`` that of a run that was stopped; with ``auto`` either.
        shuffle_scores: the control: PPO gets its scores shuffled within each batch.
        size: how much of everything; tests use less.
    """

    def __init__(
        self,
        seed: int,
        path: Path,
        *,
        resume: Resume = False,
        progress: Progress | None = None,
        shuffle_scores: bool = False,
        size: recipes.Size = recipes.FULL,
    ) -> None:
        self.seed = seed
        self.size = size
        # The recipes name files below it, so a resumed run must find the same names from another directory.
        self.path = path.absolute()
        self.resume = resume
        self._resume_stage: Resume = "auto" if resume else False
        self._lock: TextIO | None = None
        self.progress = progress if progress is not None else Progress()
        self.shuffle_scores = shuffle_scores
        self._stages: list[dict[str, Any]] = []
        self._created = datetime.now().isoformat(timespec="seconds")
        self._signals = StopSignals()

    def run(self) -> QuickstartResult:
        """Runs all stages, evaluation and report.

        Raises:
            UserError: the directory holds another run.
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; what is done is saved.
        """
        with stop_signals() as self._signals:
            self._claim()
            try:
                return self._run()
            except (Interrupted, KeyboardInterrupt) as stop:
                # Between the stages nothing else catches a signal, and there, too, the run goes on where it stopped.
                self._mark("interrupted")
                raise Interrupted(self.path, getattr(stop, "step", None), signal_number(stop)) from stop
            except BaseException:
                self._mark("failed")
                raise
            finally:
                if self._lock is not None:
                    self._lock.close()

    def _run(self) -> QuickstartResult:
        watch, held_out = Stopwatch(), self._held_out
        self._initial_model()
        self._stage("sft", self._sft)
        before, greedy_before = self._measure("sft")
        self._stage("reward_model", self._reward_model)
        self._stage("rl", self._ppo)
        after, greedy_after = self._measure("rl")
        best = max(before.values())
        examples = list(zip(held_out, greedy_before, greedy_after, strict=True))
        changes = [_change(*example) for example in examples]
        summary = {
            "job": "quickstart",
            "seed": self.seed,
            "versions": software_versions(),
            "seconds": round(watch.seconds, 1),
            "headline": _headline(before, after, best),
            "stages": self._stages,
            "exact_match": {
                "sft": {str(t): value for t, value in before.items()},
                "ppo": {str(t): value for t, value in after.items()},
                "best_sft": best,
                "gain": after[0.0] - best,
            },
            "good_same_bad": {word: changes.count(word) for word in ("good", "same", "bad")},
            "num_prompts": len(held_out),
            "shuffled_scores": self.shuffle_scores,
            "examples": [
                {"prompt": prompt, "after SFT": old, "after PPO": new, "verdict": change}
                for (prompt, old, new), change in list(zip(examples, changes, strict=True))[:NUM_EXAMPLES]
            ],
        }
        write_json(self.path / "summary.json", summary)
        self._mark("done")
        if (write_report := report_writer()) is not None:
            write_report(self.path)
        return QuickstartResult(self.path, summary)

    @property
    def _held_out(self) -> list[str]:
        return task.toy_prompts(self.seed, self.size.evaluation_prompts, "held_out")

    # Directory -------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        marker = self.path / "run.json"
        if marker.is_file():
            found: dict[str, Any] = read_json(marker)
            same = all(found.get(key) == value for key, value in self._identity().items())
            if not self.resume or not same:
                raise UserError(
                    f"output directory {self.path} already holds a run",
                    found=f"job {found.get('job')}, seed {found.get('seed')}, status {found.get('status')}",
                    remedy="add --resume (with the same seed and options) to go on with it, or choose another --out",
                )
            self._created = found.get("created", self._created)
        with naming_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(self.path / LOCK)
        self._mark("running")

    def _identity(self) -> dict[str, Any]:
        """Returns what a resumed run must have in common with the one it goes on with."""
        size = asdict(self.size)
        return {"job": "quickstart", "seed": self.seed, "shuffled_scores": self.shuffle_scores, "size": size}

    def _mark(self, status: str) -> None:
        state = {"created": self._created, "status": status, "versions": software_versions()}
        write_json(self.path / "run.json", {"name": self.path.name, **self._identity(), **state})

    def _rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes a JSONL file that `quartet sft` and the others read, too."""
        path = self.path / "data" / f"{name}.jsonl"
        with naming_write_errors(path):
            write_json_lines(path, rows)
        return path

    # Stages ----------------------------------------------------------------------------------------------

    def _stage(self, name: str, trainer: Callable[[], SFTTrainer | RewardModelTrainer | RLTrainer]) -> None:
        """Trains what is not done already, and records it."""
        watch, path, tell = Stopwatch(), self.path / name, self.progress.print
        if completed_stage(path, tell) is None:
            trainer().train()
        self._signals.check()  # one that came when the stage had nothing more to save
        done = completed_stage(path, tell)
        assert done is not None, "the stage is complete"
        # A stage that was finished before a resume took the time that it says itself.
        seconds = round(max(watch.seconds, done["seconds"]), 1)
        self._stages.append({"name": name, "seconds": seconds, "metrics": done["metrics"]})

    def _initial_model(self) -> None:
        tokenizer = build_tokenizer()
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
            **recipes.MODEL,
        )
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Qwen2ForCausalLM(config).eval()
        transformers_logging.set_verbosity(verbosity)
        packed = packed_causal_lm(model)
        save_causal_lm(packed, tokenizer, self.path / "initial")
        packed.release()

    def _sft(self) -> SFTTrainer:
        data = self._rows("demonstrations", task.toy_demonstrations(self.seed, self.size.demonstrations))
        recipe = recipes.sft_recipe(self.size, self.seed, self.path, data)
        return SFTTrainer(recipe, resume=self._resume_stage, progress=self.progress)

    def _reward_model(self) -> RewardModelTrainer:
        pairs, held_out = self._pairs()
        recipe = recipes.reward_model_recipe(self.size, self.seed, self.path, pairs, held_out)
        return RewardModelTrainer(recipe, resume=self._resume_stage, progress=self.progress)

    def _pairs(self) -> tuple[Path, Path]:
        """Makes pairs of completions of the SFT model, compared by a judge who errs; and clean pairs on held-out
        prompts.
        """
        num, answers = self.size.pair_prompts, self.size.responses_per_pair_prompt
        found = []
        with self._sampling("sft", "sample pairs", (num + num // 4) * answers) as sample:
            for split, count, error in (("train", num, JUDGE_ERROR_RATE), ("held_out", num // 4, 0.0)):
                prompts = task.toy_prompts(self.seed + 1, count, split)  # type: ignore[arg-type]
                groups = zip(prompts, sample(prompts, 1.0, answers), strict=True)
                found.append(self._rows(f"pairs_{split}", judge_pairs(self.seed, groups, error)))
        return found[0], found[1]

    @contextlib.contextmanager
    def _sampling(self, stage: str, title: str, total: int) -> Iterator[Callable[..., list[list[str]]]]:
        """Gives a function of prompts, temperature and answers per prompt that samples texts from a stage's model."""
        path = self.path / stage / "model"
        packed, codec = packed_causal_lm(load_causal_lm(str(path))), TextCodec.from_pretrained(path)
        with self.progress.stage(title, total) as bar:

            def sample(prompts: list[str], temperature: float, num: int = 1) -> list[list[str]]:
                found = generate(
                    packed,
                    codec,
                    prompts,
                    SamplingParams(temperature=temperature, max_new_tokens=recipes.MAX_NEW_TOKENS),
                    num_responses=num,
                    seed=self.seed,
                    max_running=256,
                    on_done=bar.advance,
                )
                return [[answer.text for answer in group] for group in found]

            yield sample
        packed.release()

    def _ppo(self) -> RLTrainer:
        prompts, held_out = (
            self._rows(name, [{"prompt": prompt} for prompt in found])
            for name, found in (
                ("prompts", task.toy_prompts(self.seed + 2, self.size.rl_prompts)),
                ("prompts_held_out", self._held_out),
            )
        )
        recipe = recipes.rl_recipe(self.size, self.seed, self.path, prompts, held_out)
        return RLTrainer(recipe, resume=self._resume_stage, progress=self.progress, shuffle_scores=self.shuffle_scores)

    def _measure(self, stage: str) -> tuple[dict[float, float], list[str]]:
        """Measures exact match on held-out prompts at each temperature, and returns the greedy completions, too."""
        watch, prompts = Stopwatch(), self._held_out
        with self._sampling(stage, f"evaluate {stage}", len(prompts) * len(TEMPERATURES)) as sample:
            texts = {t: [text for (text,) in sample(prompts, t)] for t in TEMPERATURES}
        exact = {t: sum(map(is_correct, prompts, found)) / len(prompts) for t, found in texts.items()}
        metrics = {f"eval/exact_match@{t}": value for t, value in exact.items()}
        self._stages.append({"name": f"evaluate_{stage}", "seconds": round(watch.seconds, 1), "metrics": metrics})
        return exact, texts[0.0]


def _headline(before: Mapping[float, float], after: Mapping[float, float], best: float) -> list[dict[str, Any]]:
    """Returns what the report shows large."""
    rows = [{"label": "Exact match, greedy, against the best of SFT", "before": best, "after": after[0.0]}]
    for temperature in TEMPERATURES[1:]:
        label = f"Exact match at temperature {temperature}"
        rows.append({"label": label, "before": before[temperature], "after": after[temperature]})
    return [{**row, "unit": "fraction"} for row in rows]


def _change(prompt: str, before: str, after: str) -> str:
    """Tells whether the prompt is now answered right that was wrong, wrong that was right, or neither."""
    return ("same", "good", "bad")[int(is_correct(prompt, after)) - int(is_correct(prompt, before))]
