"""`quartet medusa`: what is sampled, what is learned and saved, and that a killed run ends the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from breaking import fails_at
from breaking import untimed_rows as untimed
from quartet.config import UserError
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.load import load_recipe
from quartet.config.run import LogConfig
from quartet.extras.data_rows.rows import DataRows, sections_of
from quartet.extras.speculation import job
from quartet.extras.speculation.config import HeadsConfig, MedusaRecipe
from quartet.extras.speculation.heads import MedusaHeads
from quartet.extras.speculation.job import MedusaTrainer, MedusaWorker
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.sampler import sample_seed
from quartet.trainers.evaluation import run_requests
from quartet.trainers.supervised import PassedObjects


def trainer(
    path: Path, model: Any, tokenizer: Any, rows: Any, *, resume: bool = False, hooks: Any = (), **changes: Any
) -> Any:
    values: dict[str, Any] = {
        "threads": 1,
        "train": TrainConfig(optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="cosine")),
        "checkpoint": CheckpointConfig(every_steps=2),
        "log": LogConfig(tensorboard=False),
        "sampling": SamplingConfig(max_new_tokens=8),
        "steps": 5,
        "evaluate_every_steps": 5,
        "answers_per_step": 4,
        "output_dir": str(path),
    }
    recipe = MedusaRecipe(**{**values, **changes})
    given = {"model": model, "tokenizer": tokenizer, "rows": rows, "evaluation_rows": rows[:4]}
    return MedusaTrainer(recipe, **given, resume=resume, callbacks=hooks)


def same(one: Path, other: Path) -> bool:
    """Whether two runs have made the same heads, to the bit."""
    mine, theirs = (load_file(path / "medusa" / "model.safetensors") for path in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(values, theirs[name]) for name, values in mine.items())


def test_heads_learn_the_models_own_answers_and_the_model_stays(
    causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    """Greedy answers of a model that knows nothing go round in circles, which can be learned."""
    model = causal_lm()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    changes: dict[str, Any] = {
        "sampling": SamplingConfig(temperature=0.0, max_new_tokens=12),
        "heads": HeadsConfig(shared_head=False),
    }
    made = trainer(tmp_path / "run", model, tokenizer, prompts, steps=40, evaluate_every_steps=1, **changes)
    with pytest.raises(UserError, match="no answers yet"):
        made.evaluate()
    result = made.train()
    first, last = untimed(tmp_path / "run")[0], result.summary["stages"][0]["metrics"]
    assert last["eval/loss"] < 0.5 * first["eval/loss"]
    assert last["medusa/tokens_per_forward"] > first["medusa/tokens_per_forward"] + 0.5
    assert last["loss/medusa"] < 0.5 * first["loss/medusa"]
    assert result.model is model and all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    heads, trained = MedusaHeads.load(tmp_path / "run" / "medusa", PackedCausalLM(model)), made.worker.trainer.heads
    hidden = torch.randn(3, heads.hidden_size)
    assert torch.equal(heads(hidden), trained(hidden))
    digests = json.loads((tmp_path / "run" / "models.json").read_text())["files"]
    assert digests.keys() == {"medusa/config.json", "medusa/model.safetensors"}


def test_prompts_are_shown_as_they_are_answered(causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[:3]))
    recipe = load_recipe("medusa", None, [f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl"])
    shown = DataRows(sections_of(recipe)["data"], "data").rows(1, 99)
    data = MedusaWorker(recipe, PassedObjects(), torch.device("cpu")).data
    assert [sum(len(span.ids) for span in row.spans) for row in shown] == [item.num_tokens for item in data.items]


def test_answers_are_those_of_plain_decoding(causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", causal_lm(), tokenizer, prompts, samples_per_prompt=2, steps=1, seed=5)
    made.train()
    worker, packed = made.worker, PackedCausalLM(causal_lm())
    found = {key: made.worker._asked[key] for key in ("data", "evaluation_data")}
    seeds = [sample_seed(5, 0, f"p{p}", r) for p in range(len(prompts)) for r in range(2)]
    assert [request.sampling.seed for request in found["data"]] == seeds
    assert len({request.sampling.seed for of_key in found.values() for request in of_key}) == 2 * (len(prompts) + 4)
    for data, requests in zip((worker.data, worker.evaluation), found.values(), strict=True):
        for item, request in zip(data.items, requests, strict=True):
            (alone,) = run_requests(NativeEngine(packed, decode=worker.codec.decode_completion), [request])
            assert item.input_ids == (*request.prompt_ids, *alone.token_ids)
            assert item.loss_mask == (False,) * len(request.prompt_ids) + (True,) * len(alone.token_ids)


def test_a_run_that_breaks_off_and_is_resumed_ends_the_same(
    causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it samples, and between two checkpoints; with another model it does not go on."""
    monkeypatch.setattr(job, "_ANSWERS_PER_PASS", 5)
    arguments = tokenizer, prompts
    trainer(tmp_path / "whole", causal_lm(), *arguments).train()
    for stage in ("answers", "training"):
        path, broken = tmp_path / stage, trainer(tmp_path / stage, causal_lm(), *arguments)
        with monkeypatch.context() as patched:
            owner, name = (job, "run_to_end") if stage == "answers" else (broken.worker.trainer, "step")
            patched.setattr(owner, name, fails_at(4, getattr(owner, name)))
            with pytest.raises(ConnectionError):
                broken.train()
        answers = next((path / "finished").iterdir()).read_text().count("token_ids")
        assert answers == (15 if stage == "answers" else 16), "of 12 prompts and 4 held-out ones"
        trainer(path, causal_lm(), *arguments, resume=True).train()
        assert same(tmp_path / "whole", path)
        assert untimed(tmp_path / "whole") == untimed(path)


def test_answers_without_a_second_token_are_refused(
    causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="too short"):
        trainer(tmp_path / "run", causal_lm(), tokenizer, prompts, sampling=SamplingConfig(max_new_tokens=1)).train()


def test_a_budget_below_the_longest_answer_is_refused(
    causal_lm: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="forward_token_budget is too small"):
        trainer(tmp_path / "run", causal_lm(), tokenizer, prompts, train=TrainConfig(forward_token_budget=12))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {"type": "ray"}}, "heads train in one process"),
        ({"train": TrainConfig(lora=LoRAConfig())}, "the model stays as it is"),
        ({"sampling": SamplingConfig(truncated_logprobs=True)}, "has no effect here"),
        ({"heads": {"depth": 0}}, "depth"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MedusaRecipe(**changes)
