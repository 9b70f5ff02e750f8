"""The doctor: healthy recipes are all ok, and every planted fault is found by the check that is named for it."""

from __future__ import annotations

import asyncio
import copy
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config.algorithms import (
    GRPO,
    PPO,
    RLOO,
    KLConfig,
    OffPolicyConfig,
    OnlineDPO,
    ReMax,
)
from quartet.config.common import LoRAConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, CriticConfig, EvaluationConfig, RLRecipe, RolloutConfig
from quartet.config.rewards import ExactMatchReward, FunctionReward, MathReward, NumericReward
from quartet.data.datasets import PromptItem
from quartet.extras.doctor import checks
from quartet.extras.doctor import rewards as doctor_rewards
from quartet.extras.doctor.checks import Finding
from quartet.extras.doctor.examine import examine
from quartet.extras.quickstart import task
from quartet.rewards.build import build_reward
from quartet.rollout import engine as native
from quartet.rollout.sampler import sample
from quartet.schedule import rollout_worker
from quartet.schedule.iteration import ModelScorer
from quartet.schedule.rollout_worker import NativeRolloutWorker, RequestStore
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import TrainEngine
from quartet.train.forward import Needs
from quartet.train.objectives import PolicyObjective
from quartet.trainers import workers
from quartet.trainers.loop import RLLoop
from quartet.trainers.model_loader import FunctionScorer
from quartet.trainers.roles import RLRoles
from quartet.trainers.workers import LocalRunWorkers

BIG = 10**9
TRAIN = TrainConfig(token_budget=512, forward_token_budget=512)
ENGINE = NativeEngineConfig(max_running=6)
Examined = Callable[..., dict[str, Finding]]
SEPARATED = {"type": "separated", **{role: {} for role in ("actor", "critic", "reference", "reward", "rollout")}}
WITHOUT_CRITIC = {name: pool for name, pool in SEPARATED.items() if name != "critic"}
FULL_OFFLOAD = {"type": "full_offload", "pool": {"budget_bytes": BIG}}
OWN_ENGINE = {"algorithm": PPO(kl=KLConfig(coef=0.05)), "placement": FULL_OFFLOAD}


def recipe(
    path: Path,
    *,
    sampling: dict[str, Any] | None = None,
    engine: Any = ENGINE,
    **changes: Any,
) -> RLRecipe:
    values: dict[str, Any] = {
        "algorithm": GRPO(kl=KLConfig(coef=0.05)),
        "actor": ActorConfig(train=TRAIN),
        "critic": CriticConfig(train=TRAIN),
        "rollout": RolloutConfig(
            sampling=SamplingConfig(**{"max_new_tokens": 8, **(sampling or {})}),
            engine=engine,
        ),
        "steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "minibatches": 2,
        "chunk_size": 2,
        "threads": 1,
        "output_dir": str(path / "run"),
    }
    return RLRecipe(**{**values, **changes})


@pytest.fixture
def examined(causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path) -> Examined:
    """What the doctor finds about a tiny run, by the checks' names."""

    def run(
        *,
        rewards: Any = None,
        rows: Sequence[Any] = prompts,
        model: dict[str, Any] | None = None,
        objects: dict[str, Any] | None = None,
        **changes: Any,
    ) -> dict[str, Finding]:
        given = {
            "model": causal_lm(**(model or {})),
            "tokenizer": copy.deepcopy(tokenizer),
            "rewards": [digits, scalar_model()] if rewards is None else rewards,
            "prompts": rows,
            **(objects or {}),
        }
        told: list[Finding] = []
        found = examine(recipe(tmp_path, **changes), tell=told.append, **given)
        assert told == found and not (tmp_path / "run").exists(), "nothing is written where the run will be"
        return {finding.name: finding for finding in found}

    return run


def unwell(found: dict[str, Finding]) -> set[str]:
    return {name for name, finding in found.items() if finding.status != "ok"}


# Healthy recipes -----------------------------------------------------------------------------------------

HEALTHY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": PPO(kl=KLConfig(coef=0.05)), "epochs": 2},
    "remax": {"algorithm": ReMax(), "responses_per_prompt": 1},
    "online_dpo": {"algorithm": OnlineDPO()},
    "temperature": {"sampling": {"temperature": 0.7, "top_p": 0.9}},
    "in a process": {**OWN_ENGINE, "engine": NativeEngineConfig(process=True)},
    "lora, own engine": {"actor": ActorConfig(train=TrainConfig(lora=LoRAConfig(rank=4))), "placement": WITHOUT_CRITIC},
    "tied": {"model": {"tie_word_embeddings": True}, "placement": WITHOUT_CRITIC},
    "separated": {**OWN_ENGINE, "placement": SEPARATED},
    "asynchronous": {
        "algorithm": GRPO(off_policy=OffPolicyConfig(level="token", mode="truncate", cap=2.0)),
        "placement": {
            "type": "asynchronous",
            "pools": {"engine": {"roles": ["rollout"]}, "models": {"roles": ["actor", "reward"]}},
        },
    },
}


# Engines behind a router, one of them at fault, are examined in tests/unit/trainers/test_served_engines.py.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "in a process" else []) for name in HEALTHY]
)
def test_a_healthy_recipe_is_all_ok(name: str, examined: Examined) -> None:
    found = examined(**HEALTHY[name])
    assert not unwell(found), [finding.line() for finding in found.values() if finding.status != "ok"]
    assert len(found) >= 39
    needed = {"sampler_agreement", "first_ratio", "reference_kl", "tied_head", "weight_update", "weights_restored"}
    assert needed <= found.keys()


def test_a_model_that_is_passed_stays_as_it_was(examined: Examined, causal_lm: Any) -> None:
    model = causal_lm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not unwell(examined(objects={"model": model}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Planted faults: the engine -------------------------------------------------------------------------------


def of_requests(monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> None:
    """Engines get requests without something."""
    asked: Any = RequestStore.engine_requests

    def changed(self: RequestStore, request: Any) -> Any:
        return [replace(one, sampling=replace(one.sampling, **sampling)) for one in asked(self, request)]

    monkeypatch.setattr(RequestStore, "engine_requests", changed)


def of_completions(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Engines answer otherwise."""
    ended = RequestStore.ended
    monkeypatch.setattr(RequestStore, "ended", lambda self, made: ended(self, change(made)))


def of_trainer(monkeypatch: pytest.MonkeyPatch, change: Callable[[TrainEngine[Any], RaggedBatch, Needs], Any]) -> None:
    """The trainer's passes without gradient are others."""
    forward = TrainEngine.forward

    def changed(self: TrainEngine[Any], batch: RaggedBatch, needs: Needs) -> ColumnSet:
        return forward(self, *change(self, batch, needs))

    monkeypatch.setattr(TrainEngine, "forward", changed)


def test_stop_tokens_that_never_reach_the_engine(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests(monkeypatch, stop_token_ids=())
    found = examined()
    assert found["stop_tokens"].status == found["end_of_text"].status == "failure"
    assert found["truncation"].status == "warning"


def test_stop_strings_that_never_reach_the_engine(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests(monkeypatch, stop_strings=())
    found = examined()
    assert found["stop_strings"].status == "failure" and found["stop_tokens"].status == "ok"


def test_seeds_that_are_ignored(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests(monkeypatch, seed=0)
    assert unwell(examined()) >= {"diversity"}


def test_log_probabilities_of_the_token_before(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_completions(monkeypatch, lambda made: replace(made, logprobs=(*made.logprobs[1:], made.logprobs[0])))
    found = examined()
    assert found["sampler_agreement"].status == "failure" and found["weight_update"].status == "ok"


def test_versions_that_no_weights_had(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_completions(monkeypatch, lambda made: replace(made, versions=tuple(v + 1 for v in made.versions)))
    assert unwell(examined()) == {"versions"}


def test_temperature_missing_in_the_engines_log_probabilities(
    examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(logits: Any, rows: Any, positions: Any) -> Any:
        tokens, _ = sample(logits, rows, positions)
        return tokens, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)

    monkeypatch.setattr(native, "sample", unscaled)
    found = examined(sampling={"temperature": 0.5})
    assert found["temperature"].status == "failure" and "the engine leaves" in found["temperature"].found


def test_temperature_missing_in_the_trainers_log_probabilities(
    examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_trainer(monkeypatch, lambda engine, batch, needs: (batch, replace(needs, temperature=1.0)))
    found = examined(sampling={"temperature": 0.5})
    assert found["temperature"].status == "failure" and "the trainer leaves" in found["temperature"].found


def without_token(batch: RaggedBatch, token: int) -> RaggedBatch:
    """The batch in which prompts hold another token in the place of ``token``."""
    hidden = (batch.input_ids == token) & (batch.sequence_index() < 0)
    return replace(batch, input_ids=batch.input_ids.masked_fill(hidden, 5))


def test_the_pad_tokens_id_as_a_mask_in_the_trainer(
    examined: Examined, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    pad = tokenizer.pad_token_id
    of_trainer(monkeypatch, lambda engine, batch, needs: (without_token(batch, pad), needs))
    assert unwell(examined()) == {"pad_by_mask"}


def test_the_pad_tokens_id_as_a_mask_on_both_sides(
    examined: Examined, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    pad: int = tokenizer.pad_token_id
    asked: Any = RequestStore.engine_requests

    def requests(self: RequestStore, request: Any) -> Any:
        return [replace(one, prompt_ids=tuple(t for t in one.prompt_ids if t != pad)) for one in asked(self, request)]

    forward = TrainEngine.forward

    def padded(self: TrainEngine[Any], batch: RaggedBatch, needs: Needs) -> ColumnSet:
        keep = (batch.input_ids != pad) | (batch.sequence_index() >= 0)
        if bool(keep.all()):
            return forward(self, batch, needs)
        lengths = tuple(int(part.sum()) for part in keep.split(batch.segment_lengths))
        bare = replace(batch.bare(), input_ids=batch.input_ids[keep], segment_lengths=lengths)
        found = forward(self, bare.with_token(**{needs.mask: batch.token[needs.mask][keep]}), needs)
        whole = torch.zeros(batch.num_tokens)
        whole[keep] = found.token["logprobs"]
        return ColumnSet(found.ids, {"logprobs": whole})

    monkeypatch.setattr(RequestStore, "engine_requests", requests)
    monkeypatch.setattr(TrainEngine, "forward", padded)
    found = examined()
    assert unwell(found) == {"pad_by_mask"} and "no effect" in found["pad_by_mask"].found


def test_a_mask_that_leaves_the_end_out(examined: Examined, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """As where labels are masked by the pad token's id, and the end of text has the same."""
    made = rollout_worker.group_batch

    def masked(*arguments: Any) -> RaggedBatch:
        batch = made(*arguments)
        is_end = batch.input_ids == tokenizer.eos_token_id
        return batch.with_token(loss_mask=batch.token["loss_mask"] & ~is_end)

    monkeypatch.setattr(rollout_worker, "group_batch", masked)
    assert unwell(examined()) == {"end_is_learned"}


def test_a_shared_prompt_that_changes_what_follows(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TrainEngine.forward

    def changed(self: TrainEngine[Any], batch: RaggedBatch, needs: Needs) -> ColumnSet:
        found = forward(self, batch, needs)
        return ColumnSet(found.ids, {name: values + 0.01 * (len(batch) > 1) for name, values in found.token.items()})

    monkeypatch.setattr(TrainEngine, "forward", changed)
    assert unwell(examined()) >= {"packing"}


# Planted faults: weights ----------------------------------------------------------------------------------


def test_stale_weights(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    update = LocalRunWorkers.update_engine_weights

    async def once(self: LocalRunWorkers, version: int) -> int:
        return 0 if version else await update(self, version)

    monkeypatch.setattr(LocalRunWorkers, "update_engine_weights", once)
    found = examined(**OWN_ENGINE)
    assert unwell(found) == {"weight_update", "tied_head"}, "and the old ones are right again at the end"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_head_that_is_not_synced(precision: Any, examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    made = workers.own_copy

    def with_own_head(packed: Any) -> Any:
        copied = made(packed)
        copied.head = copy.deepcopy(copied.head)
        return copied

    monkeypatch.setattr(workers, "own_copy", with_own_head)
    actor = ActorConfig(train=TrainConfig(precision=precision))
    changes = {"tie_word_embeddings": True, "initializer_range": 0.3}
    found = examined(**OWN_ENGINE, actor=actor, model=changes)
    assert found["tied_head"].status == "failure" and found["sampler_agreement"].status == "ok"


def test_weights_that_sleep_changes(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = NativeRolloutWorker.offload

    def forgets(self: NativeRolloutWorker) -> Any:
        moved = offload(self)
        with self.present(), torch.no_grad():
            self.engine.packed.model.get_output_embeddings().weight.mul_(1.5)
        return moved

    monkeypatch.setattr(NativeRolloutWorker, "offload", forgets)
    assert examined(**OWN_ENGINE)["after_sleep"].status == "failure"


def test_an_engine_that_keeps_a_part_of_older_weights(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    update, updates = LocalRunWorkers.update_engine_weights, []

    async def three_times(self: LocalRunWorkers, version: int) -> int:
        updates.append(version)
        return await update(self, version) if len(updates) <= 3 else 0

    monkeypatch.setattr(LocalRunWorkers, "update_engine_weights", three_times)
    assert unwell(examined(**OWN_ENGINE)) == {"weights_restored"}


# Planted faults: what is learned --------------------------------------------------------------------------


def test_another_temperature_in_the_loss(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = RLLoop.policy_objective

    def at_one(self: RLLoop, is_first: bool) -> Any:
        return replace(made(self, is_first), temperature=1.0)

    monkeypatch.setattr(RLLoop, "policy_objective", at_one)
    assert unwell(examined(sampling={"temperature": 0.5})) == {"first_ratio"}


def test_a_gradient_that_is_not_finite(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PolicyObjective.loss
    monkeypatch.setattr(PolicyObjective, "loss", lambda *arguments: loss(*arguments) * float("nan"))
    assert unwell(examined()) == {"gradient"}


# Planted faults: rewards ----------------------------------------------------------------------------------

ROWS = [
    {"prompt": prompt, "answer": str(sum(task.operands(prompt))), "rejected": "7"} for prompt in task.toy_prompts(0, 12)
]


def test_swapped_reward_columns(examined: Examined) -> None:
    def swapped(completions: list[str], rejected: list[str], **_: Any) -> list[float]:
        return [float(c == r) + 0.01 * len(c) for c, r in zip(completions, rejected, strict=True)]

    assert unwell(examined(rewards=swapped, rows=ROWS)) == {"reward_answers"}


def of_rows(rewards: Any, rows: list[dict[str, Any]], score: Callable[[str, dict[str, Any]], float]) -> Finding:
    """What the check says where each answer has this ``score`` by its text and row; of ``rewards`` as recipes have
    them."""
    items = [PromptItem(f"p{n}", "?", row, "", 1) for n, row in enumerate(rows)]
    run_recipe = SimpleNamespace(rewards=rewards)
    roles = SimpleNamespace(recipe=run_recipe, prompts=SimpleNamespace(items=items), reward_models=[])
    known = doctor_rewards.known_answers(cast(Any, run_recipe), items, 8)
    texts = [(row, kind, text) for row, answer in enumerate(known) for kind, text in answer.texts()]
    values = torch.tensor([score(text, rows[row]) for row, _, text in texts], dtype=torch.float64)
    scored = doctor_rewards.Scored({rewards[0].name: values}, values, [], 0.0)
    return doctor_rewards.check_known_answers(
        cast(Any, SimpleNamespace(roles=roles)), doctor_rewards.KnownScores(scored, texts)
    )


def by_rule(rewards: Any, rows: list[dict[str, Any]]) -> Finding:
    source = build_reward(rewards[0]).source

    def score(text: str, row: dict[str, Any]) -> float:
        columns = {name: [value] for name, value in row.items()}
        (found,) = asyncio.run(source.score(["?"], [text], columns))
        return math.nan if found is None else found

    try:
        return of_rows(rewards, rows, score)
    finally:
        source.close()


LATEX = [{"answer": text} for text in ("1 - \\sqrt{2}", "8\\pi", "(1, 2)", "2+3i", "\\frac{3}{4}", "7")]
LEVELS = [{"answer": f"so {n} + 2 = {n + 2}", "level": str(n % 3 + 20)} for n in range(1, 7)]
DETAILED = [{"answer": str(n + 2), "solution": f"{n} + 2 = {n + 2}", "level": n % 3 + 20} for n in range(1, 7)]


@pytest.mark.parametrize(
    ("reward", "rows", "status", "told"),
    [
        (NumericReward(), LATEX, "failure", "takes a part for the whole"),
        (ExactMatchReward(), LATEX, "ok", ""),
        (MathReward(), LATEX, "ok", ""),
        (NumericReward(), LEVELS, "ok", ""),
        (NumericReward(), [{"answer": f"{n} apples"} for n in range(6)], "ok", ""),
        (NumericReward(column="level"), LEVELS, "failure", "by 'level', with which numeric compares"),
        (NumericReward(column="level"), DETAILED, "failure", "by 'level', with which numeric compares"),
        (ExactMatchReward(column="level"), DETAILED, "failure", "by 'level', with which exact_match compares"),
        (NumericReward(), DETAILED, "ok", ""),
        (NumericReward(column="solution"), DETAILED, "ok", ""),
        (ExactMatchReward(), DETAILED, "ok", ""),
        (
            NumericReward(column="level"),
            [{"level": row["level"]} for row in DETAILED],
            "warning",
            "from the column 'level' alone",
        ),
        (NumericReward(), [{**row, "answer": row["level"]} for row in DETAILED], "warning", "no answer of another"),
    ],
)
def test_rules_are_tried_on_parts_of_answers_and_by_another_column(
    reward: Any, rows: Any, status: str, told: str
) -> None:
    if isinstance(reward, MathReward):
        pytest.importorskip("math_verify")
    found = by_rule([reward], rows)
    assert found.status == status and told in found.found, found.line()


@pytest.mark.parametrize(
    ("score", "status"),
    [
        (lambda text, row: float(text in row["answer"]), "failure"),
        (lambda text, row: float(text == row["answer"]), "ok"),
        (lambda text, row: 0.5 * (text in row["answer"]) + 0.5 * (text == row["answer"]), "ok"),
        (lambda text, row: 1 / (1 + len(text)), "ok"),
    ],
)
def test_functions_are_tried_on_parts_of_answers_where_they_compare(score: Any, status: str) -> None:
    rows = [{**row, "rejected": "no, quite another answer"} for row in LATEX]
    found = of_rows([FunctionReward(target="f.py:f", name="f")], rows, score)
    assert found.status == status, found.line()


def test_scores_in_another_order(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    score = FunctionScorer.score

    async def rolled(self: FunctionScorer, chunk: Any) -> ColumnSet:
        found = await score(self, chunk)
        return ColumnSet(found.ids, sequence={name: values.roll(1) for name, values in found.sequence.items()})

    monkeypatch.setattr(FunctionScorer, "score", rolled)
    assert unwell(examined()) == {"reward_repeats"}


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def silent(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def fails(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no such answer")


def slow(completions: list[str], **_: Any) -> list[float]:
    time.sleep(1.1)
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("reward", "changes", "expected"),
    [
        (constant, {}, {"reward_spread"}),
        (silent, {}, {"reward_values"}),
        (fails, {}, {"reward_values"}),
        (slow, {"prompts_per_step": 4096, "chunk_size": 64}, {"reward_time"}),
    ],
)
def test_rewards_that_teach_nothing(examined: Examined, reward: Any, changes: Any, expected: set[str]) -> None:
    found = examined(rewards=reward, **changes)
    assert expected <= unwell(found) <= {*expected, "reward_spread"}


# Planted faults: data, text, tokens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rows": ["1+1="] * 3 + ["2+2="]}, {"duplicates"}),
        ({"rows": ["12+3=x", "4+5="]}, {"unknown_tokens", "round_trip"}),
        ({"sampling": {"max_new_tokens": 60}}, {"prompt_lengths"}),
        ({"rows": [{**row, "answer": "1234567890"} for row in ROWS], "rewards": lengths}, {"answer_lengths"}),
        (
            {
                "rows": [{**row, "answer": "1;2"} for row in ROWS],
                "sampling": {"stop_strings": (";",)},
                "rewards": lengths,
            },
            {"answer_stops"},
        ),
        ({"steps": 10**10}, {"duration"}),
        (
            {"objects": {"evaluation_prompts": task.toy_prompts(0, 12)[:3]}, "evaluation": EvaluationConfig()},
            {"held_out"},
        ),
    ],
)
def test_faults_of_data_and_recipe(examined: Examined, changes: Any, expected: set[str]) -> None:
    assert unwell(examined(**changes)) == expected


def test_no_room_in_memory(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.extras.doctor.examine.available_bytes", lambda: 1000)
    assert unwell(examined()) == {"memory"}


def test_a_budget_that_a_role_does_not_fit(examined: Examined) -> None:
    found = examined(**{**OWN_ENGINE, "placement": {"type": "full_offload", "pool": {"budget_bytes": 1000}}})
    assert unwell(found) == {"start"} and "a budget of at least" in found["start"].remedy


def test_a_directory_that_holds_another_run(tmp_path: Path, causal_lm: Any, tokenizer: Any, prompts: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    objects = {"model": causal_lm(), "tokenizer": tokenizer, "prompts": prompts, "rewards": constant}
    found = {finding.name: finding for finding in examine(recipe(tmp_path), **objects)}
    assert found["output_dir"].status == "warning" and found["weight_update"].status == "ok"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


# Chat templates -------------------------------------------------------------------------------------------

TURNS = "{% for m in messages %}{{ bos }}{{ m['content'] }}{{ end }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}={% endif %}"
CHAT = [[{"role": "system", "content": "12"}, {"role": "user", "content": "1+2"}]]


def codec(tokenizer: Any, template: str, **special: str) -> TextCodec:
    chatty = copy.deepcopy(tokenizer)
    chatty.add_special_tokens(special)
    chatty.chat_template = template
    return TextCodec(chatty)


def begin_of_text(codec: TextCodec, prompts: Sequence[Any]) -> Finding:
    return checks.check_begin_of_text(codec, [codec.encode_prompt(prompt) for prompt in prompts])


@pytest.mark.parametrize(
    ("template", "check", "named"),
    [
        (TURNS, checks.check_template, "1 of 1"),
        (TURNS.replace("{{ end }}", "<end>") + PROMPT, checks.check_turn_end, "'<end>'"),
        ("<bos><bos>" + TURNS + PROMPT, begin_of_text, "1 of 1"),
    ],
)
def test_wrong_templates(tokenizer: Any, template: str, check: Any, named: str) -> None:
    wrong = codec(tokenizer, template, bos_token="<bos>", additional_special_tokens=["<end>"])  # type: ignore[arg-type]
    found = check(wrong, CHAT)
    assert found.status == "failure" and named in found.found and found.remedy


@pytest.mark.parametrize(
    ("decoder", "status"),
    [
        (["Replace", "Fuse", "Strip"], "ok"),
        (["Replace", "Fuse"], "ok"),
        (["Drop", "Fuse"], "failure"),
    ],
)
@pytest.mark.parametrize("text", ["<s>a b  c<|x|>d"])
def test_the_blank_that_sentencepiece_puts_behind_special_tokens(decoder: list[str], status: str, text: str) -> None:
    """As Llama's: a blank before every text, and so behind every special token; only the first is taken off again."""
    steps = {
        "Replace": decoders.Replace("▁", " "),
        "Drop": decoders.Replace("a", ""),
        "Fuse": decoders.Fuse(),
        "Strip": decoders.Strip(" ", 1, 0),
    }
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate(["<unk>", "▁", "\n", *"abcd"])}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([steps[name] for name in decoder])
    backend.add_special_tokens(["<s>", "<|x|>"])
    found = checks.check_round_trip(
        TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")), [text]
    )
    assert found.status == status, found.line()


def test_a_tokenizer_that_loses_case(tokenizer: Any) -> None:
    lossy = copy.deepcopy(tokenizer)
    lossy.backend_tokenizer.normalizer = normalizers.Replace("1", "2")
    assert checks.check_round_trip(TextCodec(lossy), ["1+2=", "11+2="]).status == "failure"


# By itself ------------------------------------------------------------------------------------------------


def test_a_run_says_by_itself_what_is_cheap_to_find(
    tiny_rl: Any, digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_rl(tmp_path / "healthy", digits, algorithm=RLOO(), steps=1, prompts_per_step=2).train()
    assert "warning:" not in capsys.readouterr().out
    wide = RolloutConfig(sampling=SamplingConfig(max_new_tokens=60))
    tiny_rl(tmp_path / "wide", digits, algorithm=RLOO(), steps=1, prompts_per_step=2, rollout=wide).train()
    assert "warning: prompt_lengths: 0.0% of 12 prompts" in capsys.readouterr().out


def test_a_reference_at_another_temperature(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RLRoles.column_scorers

    def changed(self: RLRoles, leases: Any) -> list[ModelScorer]:
        return [
            replace(one, needs=replace(one.needs, temperature=0.5)) if one.role == "reference" else one
            for one in made(self, leases)
        ]

    monkeypatch.setattr(RLRoles, "column_scorers", changed)
    assert unwell(examined()) == {"reference_kl"}


def test_a_critic_whose_values_are_no_numbers(examined: Examined, scalar_model: Any) -> None:
    critic = scalar_model()
    with torch.no_grad():
        critic.score.weight.fill_(float("nan"))
    found = examined(algorithm=PPO(), objects={"critic": critic})
    assert found["critic_values"].status == "failure"


def test_no_room_on_the_disk(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert unwell(examined()) == {"disk"}
