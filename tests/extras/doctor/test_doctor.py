"""The doctor: healthy recipes are all ok, and every planted fault is found."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from quartet.extras.doctor import checks
from quartet.extras.doctor.checks import Finding
from quartet.extras.doctor.examine import examine
from quartet.extras.quickstart import task
from quartet.rollout import engine as native
from quartet.rollout.sampler import sample
from quartet.schedule.iteration import ModelScorer
from quartet.schedule.rollout_worker import RequestStore
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.train.objectives import PolicyObjective
from quartet.trainers import workers
from quartet.trainers.loop import RLLoop
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
    assert len(found) == 25
    needed = {"sampler_agreement", "first_ratio", "reference_kl", "weight_update"}
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


def test_stop_tokens_that_never_reach_the_engine(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests(monkeypatch, stop_token_ids=())
    found = examined()
    assert found["end_of_text"].status == "failure" and found["truncation"].status == "warning"


def test_seeds_that_are_ignored(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_requests(monkeypatch, seed=0)
    assert unwell(examined()) >= {"diversity"}


def test_log_probabilities_of_the_token_before(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    of_completions(monkeypatch, lambda made: replace(made, logprobs=(*made.logprobs[1:], made.logprobs[0])))
    found = examined()
    assert found["sampler_agreement"].status == "failure" and found["weight_update"].status == "ok"


def test_temperature_missing_in_the_engines_log_probabilities(
    examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(logits: Any, rows: Any, positions: Any) -> Any:
        tokens, _ = sample(logits, rows, positions)
        return tokens, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)

    monkeypatch.setattr(native, "sample", unscaled)
    assert examined(sampling={"temperature": 0.5})["sampler_agreement"].status == "failure"


def test_temperature_missing_in_the_trainers_log_probabilities(
    examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TrainEngine.forward

    def changed(self: TrainEngine[Any], batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        return forward(self, batch, replace(needs, temperature=1.0))

    monkeypatch.setattr(TrainEngine, "forward", changed)
    assert examined(sampling={"temperature": 0.5})["sampler_agreement"].status == "failure"


# Planted faults: weights ----------------------------------------------------------------------------------


def test_stale_weights(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    update = LocalRunWorkers.update_engine_weights

    async def once(self: LocalRunWorkers, version: int) -> int:
        return 0 if version else await update(self, version)

    monkeypatch.setattr(LocalRunWorkers, "update_engine_weights", once)
    assert unwell(examined(**OWN_ENGINE)) == {"weight_update"}


def test_a_tied_head_that_is_not_synced(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    made = workers.own_copy

    def with_own_head(packed: Any) -> Any:
        copied = made(packed)
        copied.head = copy.deepcopy(copied.head)
        return copied

    monkeypatch.setattr(workers, "own_copy", with_own_head)
    found = examined(**OWN_ENGINE, model={"tie_word_embeddings": True, "initializer_range": 0.3})
    assert unwell(found) == {"weight_update"}


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
        ({"rows": ["12+3=x", "4+5="]}, {"round_trip"}),
        ({"sampling": {"max_new_tokens": 60}}, {"prompt_lengths"}),
        ({"rows": [{**row, "answer": "1234567890"} for row in ROWS], "rewards": lengths}, {"answer_lengths"}),
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
    assert "warning: prompt_lengths: 100.0% of 12 prompts" in capsys.readouterr().out


def test_a_reference_at_another_temperature(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RLRoles.column_scorers

    def changed(self: RLRoles, leases: Any) -> list[ModelScorer]:
        return [
            replace(one, needs=replace(one.needs, temperature=0.5)) if one.role == "reference" else one
            for one in made(self, leases)
        ]

    monkeypatch.setattr(RLRoles, "column_scorers", changed)
    assert unwell(examined()) == {"reference_kl"}


def test_no_room_on_the_disk(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert unwell(examined()) == {"disk"}
