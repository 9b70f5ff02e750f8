"""The iterated reward model: two whole rounds on tiny models, stages that are not run twice, pairs by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.config import Interrupted, UserError
from quartet.config.load import load_recipe
from quartet.config.run import LogConfig
from quartet.extras.iterated.config import IteratedRecipe
from quartet.extras.iterated.trainer import IteratedTrainer, make_pair
from quartet.extras.quickstart import task
from quartet.observe.callbacks import Callback
from quartet.observe.trackers import read_metrics
from quartet.trainers.evaluation_metrics import ScoredAnswer
from quartet.trainers.rl import RLTrainer
from quartet.trainers.supervised import RewardModelTrainer


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def recipe(
    tmp_path: Path, causal_lm: Any, tokenizer: Any, pairs: list[dict[str, str]]
) -> Callable[..., IteratedRecipe]:
    model = tmp_path / "policy"
    told_apart = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    causal_lm().save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = write(tmp_path / "pairs.jsonl", [{"question": p["prompt"], **p} for p in told_apart[:4]])
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": p} for p in task.toy_prompts(0, 12)])

    def make(name: str = "loop", *overrides: str) -> IteratedRecipe:
        found = load_recipe(
            "iterated-reward-model",
            None,
            [
                f"output_dir={tmp_path / name}",
                "log.tensorboard=false",
                "collect={labeller: {type: length, target: 4}, prompts_per_round: 8}",
                f"reward_model.model.path={model}",
                f"reward_model.data={{path: '{data}', columns: {{prompt: question}}}}",
                "reward_model.steps=2",
                "reward_model.pairs_per_step=4",
                "reward_model.log.tensorboard=false",
                f"rl.actor.model.path={model}",
                f"rl.data.path={prompts}",
                "rl.algorithm.name=rloo",
                "rl.algorithm.kl.coef=0.05",
                "rl.responses_per_prompt=2",
                "rl.prompts_per_step=4",
                "rl.steps=2",
                "rl.rollout.sampling.max_new_tokens=6",
                "rl.log.tensorboard=false",
                *overrides,
            ],
        )
        assert isinstance(found, IteratedRecipe)
        return found

    return make


def test_two_rounds(recipe: Any, tmp_path: Path) -> None:
    result = IteratedTrainer(recipe("loop", "collect.prompts_per_round=6")).train()
    path = tmp_path / "loop"
    assert [stage["name"] for stage in result.summary["stages"]] == [
        f"round_{n}_{stage}" for n in (1, 2) for stage in ("collect", "reward_model", "rl")
    ]
    first, second = (rows_of(path / "data" / f"pairs_round_{n}.jsonl") for n in (1, 2))
    answers = [rows_of(path / "data" / f"answers_round_{n}.jsonl") for n in (1, 2)]
    asked = [{row["prompt"] for row in rows} for rows in answers]
    assert len(asked[0]) == len(asked[1]) == 6 and not asked[0] & asked[1], "twelve prompts, six fresh ones per round"
    for n in (1, 2):
        learned = yaml.safe_load((path / f"round_{n}_reward_model" / "recipe.yaml").read_text())["data"]["sources"]
        fresh = [str(path / "data" / f"pairs_round_{k}.jsonl") for k in range(1, n + 1)]
        assert [source["path"] for source in learned] == [str(tmp_path / "pairs.jsonl"), *fresh], "nothing is forgotten"
    for pair in first + second:
        distance = [abs(len(pair[side]) - 4) for side in ("chosen", "rejected")]
        assert distance[0] < distance[1], "labelled by how near their length is to 4"
    rounds = read_metrics(path / "metrics.jsonl")
    assert [row["step"] for row in rounds] == [1, 2]
    assert rounds[0]["iterated/pairs"] == len(first)
    # the second round goes on with the first one's policy and a reward model of its own
    configs = [(path / f"round_{n}_rl" / "recipe.yaml").read_text() for n in (1, 2)]
    assert f"{path}/round_1_rl/model" in configs[1] and f"{path}/round_1_rl/model" not in configs[0]
    for n, config in enumerate(configs, start=1):
        assert f"{path}/round_{n}_reward_model/model" in config
    assert f"path: {tmp_path}/policy" in configs[1], "the reference stays the first policy"
    AutoModelForCausalLM.from_pretrained(path / "model")
    AutoModelForSequenceClassification.from_pretrained(path / "reward_model")
    assert (path / "model").resolve() == path / "round_2_rl" / "model"
    assert json.loads((path / "run.json").read_text())["status"] == "done"


def test_a_loop_that_stopped_goes_on_where_it_was(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at every stage in turn; the same files as a loop that never stopped, and no stage runs twice."""
    short = ("rl.steps=1", "reward_model.steps=1")
    whole = IteratedTrainer(recipe("whole", *short)).train()
    started: list[str] = []

    def count(cls: Any) -> None:
        original = cls.train

        def train(self: Any) -> Any:
            if len(started) == stop_at:
                raise KeyboardInterrupt
            started.append(self.path.name)
            return original(self)

        monkeypatch.setattr(cls, "train", train)

    count(RewardModelTrainer)
    count(RLTrainer)
    for stop_at in range(4):
        with pytest.raises(Interrupted) as caught:
            IteratedTrainer(recipe("stopped", *short), resume=stop_at > 0).train()
        assert caught.value.path == tmp_path / "stopped"
        assert json.loads((tmp_path / "stopped" / "run.json").read_text())["status"] == "interrupted"
    stop_at = -1
    result = IteratedTrainer(recipe("stopped", *short), resume=True).train()
    assert started == ["round_1_reward_model", "round_1_rl", "round_2_reward_model", "round_2_rl"]
    for name in ("data/pairs_round_2.jsonl", "round_2_rl/model/model.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    names = [[stage["name"] for stage in found.summary["stages"]] for found in (whole, result)]
    assert names[0] == names[1]
    assert [row["step"] for row in read_metrics(tmp_path / "stopped" / "metrics.jsonl")] == [1, 2]


def test_a_loop_may_be_moved_while_a_stage_is_under_way(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run at a URL is by another machine: its stages' recipes and checkpoints name files by the former place."""
    short = ("rl.steps=3", "reward_model.steps=1", "rl.checkpoint.every_steps=1", "rounds=1")
    IteratedTrainer(recipe("whole", *short)).train()
    step = RLTrainer._step

    async def stopped(self: Any, number: int, attempt: Any) -> int:
        if number == 2:
            raise KeyboardInterrupt
        return await step(self, number, attempt)

    with monkeypatch.context() as patch:
        patch.setattr(RLTrainer, "_step", stopped)
        with pytest.raises(Interrupted):
            IteratedTrainer(recipe("loop", *short)).train()
    (tmp_path / "loop").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="was started with another recipe"):
        IteratedTrainer(recipe("moved", *short, "rl.prompts_per_step=2"), resume=True).train()
    IteratedTrainer(recipe("moved", *short), resume=True).train()
    for name in ("data/pairs_round_1.jsonl", "round_1_rl/model/model.safetensors"):
        assert (tmp_path / "moved" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    told = json.loads((tmp_path / "moved" / "round_1_rl" / "run.json").read_text()).get("remarks", [])
    assert not told


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_what_was_damaged_since_is_made_again(recipe: Any, tmp_path: Path) -> None:
    """A stage's model and its summary; both come out as they were."""
    short = ("rl.steps=1", "reward_model.steps=1", "rounds=1")
    IteratedTrainer(recipe("loop", *short)).train()
    path = tmp_path / "loop"
    model, summary = path / "round_1_reward_model/model/model.safetensors", path / "round_1_rl/summary.json"
    before = model.read_bytes()
    flip(model)
    summary.write_text("{")
    (path / "summary.json").write_text("")
    (path / "model").unlink()
    (path / "model").symlink_to("elsewhere")
    IteratedTrainer(recipe("loop", *short), resume=True).train()
    assert model.read_bytes() == before
    assert json.loads(summary.read_text())["stages"]
    assert (path / "model").resolve() == path / "round_1_rl" / "model"


def test_starting_without_pairs(recipe: Any, tmp_path: Path) -> None:
    IteratedTrainer(recipe("loop", "reward_model.data=null", "rl.steps=1", "rounds=1")).train()
    path = tmp_path / "loop"
    learned = yaml.safe_load((path / "round_1_reward_model" / "recipe.yaml").read_text())["data"]["sources"]
    assert [source["path"] for source in learned] == [str(path / "data" / "pairs_round_1.jsonl")]


def test_a_labeller_that_tells_nothing_apart_is_an_error(recipe: Any) -> None:
    blind = "collect.labeller={type: regex, pattern: 'never there'}"
    with pytest.raises(UserError, match="no pairs"):
        IteratedTrainer(recipe("loop", blind)).train()


# Pairs -----------------------------------------------------------------------------------------------------


def group(*labels: float) -> list[ScoredAnswer]:
    return [ScoredAnswer("p", n, "p", f"answer {n}", "stop", 2, {"x": label}) for n, label in enumerate(labels)]


def test_best_and_worst() -> None:
    pair = make_pair(group(0.2, 0.9, float("nan"), 0.1), "x")
    assert pair == {"prompt": "p", "chosen": "answer 1", "rejected": "answer 3"}
    assert make_pair(group(0.5, 0.5), "x") is None
    assert make_pair(group(0.5), "x") is None


def test_an_iterated_run_ends_after_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = IteratedRecipe(
        output_dir=str(tmp_path / "run"), rounds=3, log=LogConfig(tensorboard=False),
        collect={"labeller": {"type": "length", "target": 3}},
        rl={"actor": {"model": {"path": "./m"}}, "data": {"path": "p"}}, reward_model={"model": {"path": "./m"}},
    )  # fmt: skip
    done: list[int] = []
    told: list[str | int] = []

    class Notes(Callback):
        def on_train_begin(self) -> None:
            told.append("begin")

        def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
            told.append(step)
            self.control.should_stop = step == 2

        def on_train_end(self) -> None:
            told.append("end")

    monkeypatch.setattr(IteratedTrainer, "_round", lambda self, n: done.append(n) or {"iterated/pairs": 1.0})
    IteratedTrainer(recipe, callbacks=[Notes()]).train()
    assert done == [1, 2]
    assert told == ["begin", 1, 2, "end"]
