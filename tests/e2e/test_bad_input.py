"""What users get wrong, through the command line: exit status 2, a message in three parts, nothing written lost."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.observe.rollouts import read_rollout_step


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trian.optim.lr=1e-3", ["trian", "train"]),
        ("steps=0", ["steps"]),
    ],
)
def test_recipe_keys_and_types(
    world: Any, quartet: Any, recipes: Any, override: str, parts: list[str], tmp_path: Path
) -> None:
    recipe = world.recipe("keys", recipes["sft"](output_dir=str(tmp_path / "run")))
    quartet("sft", recipe, override).expect_user_error(*parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data": {"path": "demonstration.jsonl"}}, ["demonstration.jsonl"]),
        ({"model": {"path": "./modle"}}, ["modle"]),
        ({"model": {"path": "./data_only"}}, ["data_only"]),
        ({"data": None}, ["data"]),
        ({"model": None}, ["model"]),
    ],
)
def test_missing_files(
    world: Any, quartet: Any, recipes: Any, changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    (world.path / "data_only").mkdir(exist_ok=True)
    recipe = world.recipe("missing", recipes["sft"](output_dir=str(tmp_path / "run"), **changes))
    quartet("sft", recipe).expect_user_error(*parts)
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_offers_the_nearest(world: Any, quartet: Any, recipes: Any) -> None:
    world.recipe("present", recipes["sft"]())
    quartet("sft", "presnt.yaml").expect_user_error("presnt.yaml", "present.yaml")


@pytest.mark.parametrize("job", ["rl", "reward-model"])
def test_a_recipe_of_another_job(world: Any, quartet: Any, recipes: Any, job: str) -> None:
    quartet(job, world.recipe("job", {"job": "sft", **recipes["sft"]()})).expect_user_error(
        "is for another job", "job: sft"
    )


ROW = json.dumps({"prompt": "1+1=", "completion": "2"})


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["rows.jsonl"]),
        (f'{ROW}\n{{"prompt": "1+2="\n', ["rows.jsonl", "2"]),
        (f'{ROW}\n{{"prompt": "1+2="}}\n', ["rows.jsonl", "2", "completion"]),
        (f'{ROW}\n{{"prompt": "1+2=", "completion": "3 \\ud83d"}}\n', ["rows.jsonl:2", "cannot read a text"]),
        (f'{ROW}\n{{"prompt": "1+2=", "completion": "{"1" * 200}"}}\n', ["rows.jsonl", "2", "205", "skip"]),
    ],
)
def test_rows_are_named_by_file_and_line(
    world: Any, quartet: Any, recipes: Any, content: str, parts: list[str], tmp_path: Path
) -> None:
    (world.path / "rows.jsonl").write_text(content, encoding="utf-8")
    recipe = world.recipe("rows", recipes["sft"](output_dir=str(tmp_path / "run"), data={"path": "rows.jsonl"}))
    quartet("sft", recipe).expect_user_error(*parts)
    assert not (tmp_path / "run").exists()


def test_a_prompt_longer_than_the_context(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1+2="}, {"prompt": "1" * 128}]
    (world.path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {"output_dir": str(tmp_path / "run"), "data": {"path": "long.jsonl"}, "steps": 1}
    recipe = world.recipe("long", recipes["rl"]("grpo", **changes))
    quartet("rl", recipe).expect_user_error("long.jsonl", "128", "127", "overlong=skip")
    assert not (tmp_path / "run").exists()
    assert quartet("rl", recipe, "data.overlong=skip").status == 0


@contextmanager
def _tokenizer_without(world: Any, name: str, **changes: str | None) -> Iterator[str]:
    """A copy of the model whose tokenizer (and generation config) differ."""
    model = AutoModelForCausalLM.from_pretrained(world.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(world.path / "model")
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    if changes.get("eos_token", "") is None:
        model.config.eos_token_id = model.generation_config.eos_token_id = None
    if changes.get("pad_token", "") is None:
        model.config.pad_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(world.path / name)
    tokenizer.save_pretrained(world.path / name)
    yield name


def test_a_tokenizer_without_pad_is_fine(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    with _tokenizer_without(world, "no_pad", pad_token=None) as model:
        recipe = world.recipe(
            "no_pad", recipes["sft"](output_dir=str(tmp_path / "run"), model={"path": model}, steps=2)
        )
        outcome = quartet("sft", recipe)
    assert outcome.status == 0, outcome.err


def test_a_tokenizer_without_eos_cannot_learn_to_end(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    with _tokenizer_without(world, "no_eos", eos_token=None) as model:
        recipe = world.recipe(
            "no_eos", recipes["sft"](output_dir=str(tmp_path / "run"), model={"path": model}, steps=2)
        )
        quartet("sft", recipe).expect_user_error("end-of-text", "eos_token")


def test_pad_equal_to_eos_still_learns_to_end(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    """Nothing is masked by ``id == pad``: after training the end of text is what follows the answer."""
    rows = [{"prompt": "1+2=", "completion": "3"}, {"prompt": "3+4=", "completion": "7"}]
    (world.path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with _tokenizer_without(world, "pad_is_eos", pad_token="<eos>") as model:
        changes = {"model": {"path": model}, "data": {"path": "two.jsonl"}, "steps": 30, "examples_per_step": 2}
        recipe = world.recipe("pad_is_eos", recipes["sft"](output_dir=str(tmp_path / "run"), **changes))
        assert quartet("sft", recipe).status == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    with torch.no_grad():
        logits = trained(torch.tensor([tokenizer("1+2=3")["input_ids"]])).logits[0, -1]
    assert int(logits.argmax()) == tokenizer.eos_token_id
    assert float(logits.softmax(0)[tokenizer.eos_token_id]) > 0.5


def test_a_vocabulary_that_does_not_fit(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.path / "model")
    tokenizer.add_tokens([f"<new{k}>" for k in range(8)])
    tokenizer.save_pretrained(world.path / "larger_tokenizer")
    changes = {"model": {"path": "model", "tokenizer": "larger_tokenizer"}, "output_dir": str(tmp_path / "run")}
    quartet("sft", world.recipe("vocabulary", recipes["sft"](**changes))).expect_user_error("id 23", "16 rows")
    assert not (tmp_path / "run").exists()


# Rewards -------------------------------------------------------------------------------------------------

FAILURES = {
    "raises": ("raise RuntimeError('no idea')", "no idea"),
    "nan": ("scores[1] = float('nan')", "nan"),
}
REWARD = """
calls = 0


def digits(completions, **_):
    global calls
    calls += 1
    scores = [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
    if calls == {call}:
        {fault}
    return scores
"""


@pytest.fixture(scope="module")
def without_failure(world_of_session: Any, processes: Any, recipes: Any) -> Path:
    (world_of_session.path / "good_reward.py").write_text(REWARD.format(call=-1, fault="pass"), encoding="utf-8")
    reward = {"type": "function", "target": "good_reward.py:digits"}
    recipe = world_of_session.recipe(
        "good_reward", recipes["rl"]("grpo", output_dir="runs/good_reward", rewards=[reward], steps=4)
    )
    log = world_of_session.path / "good_reward.log"
    assert processes.run("rl", recipe, cwd=world_of_session.path, output=log) == 0, log.read_text()
    return world_of_session.path / "runs" / "good_reward"


@pytest.mark.parametrize(("kind", "call"), [("raises", 13), ("nan", 16)])
def test_a_failing_reward_stops_before_the_update_and_can_be_mended(
    world: Any, quartet: Any, recipes: Any, without_failure: Path, same_run: Any, kind: str, call: int
) -> None:
    """Four chunks a step: call 13 and 16 are in the fourth step, whose predecessor no checkpoint was due for."""
    fault, shown = FAILURES[kind]
    name = f"reward_{kind}_{call}"
    source = world.path / f"{name}.py"
    source.write_text(REWARD.format(call=call, fault=fault), encoding="utf-8")
    reward = {"type": "function", "target": f"{name}.py:digits"}
    recipe = world.recipe(name, recipes["rl"]("grpo", output_dir=f"runs/{name}", rewards=[reward], steps=4))
    quartet("rl", recipe).expect_user_error(shown, "prompt", "completion", "resume")
    run = world.path / "runs" / name
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step_00000002", "step_00000003"]
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    source.write_text(REWARD.format(call=-1, fault="pass"), encoding="utf-8")
    outcome = quartet("rl", recipe, "--resume")
    assert outcome.status == 0, outcome.err
    same_run(without_failure, run)


def test_a_reward_that_does_not_apply_is_left_out_and_counted(
    world: Any, quartet: Any, recipes: Any, metrics_of: Any
) -> None:
    """None for the first response of every group of four, and for all but one of every second group."""
    (world.path / "partial.py").write_text(
        "def partial(completions, **_):\n"
        "    scores = [float(len(text)) for text in completions]\n"
        "    for start in range(0, len(scores), 8):\n"
        "        scores[start] = None\n"
        "        scores[start + 4:start + 7] = [None] * 3\n"
        "    return scores\n",
        encoding="utf-8",
    )
    reward = {"type": "function", "target": "partial.py:partial"}
    changes = {"rewards": [reward], "steps": 1, "responses_per_prompt": 4, "chunk_size": 2}
    recipe = world.recipe("partial", recipes["rl"]("grpo", output_dir="runs/partial", **changes))
    outcome = quartet("rl", recipe)
    assert outcome.status == 0, outcome.err
    run = world.path / "runs" / "partial"
    assert metrics_of(run)[-1]["reward/not_applicable"] == 8.0
    records = read_rollout_step(run / "rollouts", 1)
    alone = [record for record in records if int(record.group) % 2 == 1]
    assert all(not any(record.columns["loss_mask"]) for record in alone), "one scored member has nobody to compare with"
    for record in records:
        left_out = record.score is None or record in alone
        assert any(record.columns["loss_mask"]) is not left_out
        assert not left_out or not any(record.columns["advantages"])


def test_a_reward_that_never_applies_trains_nothing(world: Any, quartet: Any, recipes: Any, metrics_of: Any) -> None:
    (world.path / "never.py").write_text("def never(completions, **_):\n    return [None] * len(completions)\n")
    changes = {"rewards": [{"type": "function", "target": "never.py:never"}], "steps": 1}
    name = "never"
    outcome = quartet("rl", world.recipe(name, recipes["rl"]("grpo", output_dir=f"runs/{name}", **changes)))
    assert outcome.status == 0, outcome.err
    assert metrics_of(world.path / "runs" / name)[-1]["reward/not_applicable"] == 8.0
    before = AutoModelForCausalLM.from_pretrained(world.path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(world.path / "runs" / name / "model").state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ({"type": "function", "target": "rewards.py:digit"}, ["digit", "digits"]),
        ({"type": "function", "target": "asking.py:asks"}, ["answre", "answer"]),
        ({"type": "model", "path": "model"}, ["reward model"]),
    ],
)
def test_rewards_are_checked_before_anything_starts(
    world: Any, quartet: Any, recipes: Any, reward: dict[str, str], parts: list[str], tmp_path: Path
) -> None:
    (world.path / "asking.py").write_text("def asks(completions, answre):\n    return [0.0] * len(completions)\n")
    recipe = world.recipe("rewards", recipes["rl"]("grpo", output_dir=str(tmp_path / "run"), rewards=[reward]))
    quartet("rl", recipe).expect_user_error(*parts)
    assert not (tmp_path / "run").exists()


# Disk and directories ------------------------------------------------------------------------------------


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``num_bytes``, as on a full disk (the error is EFBIG, not ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_does_not_fit_is_reported_and_resumed(
    world: Any, quartet: Any, recipes: Any, tmp_path: Path
) -> None:
    recipe = world.recipe("full", recipes["sft"](output_dir=str(tmp_path / "run")))
    with _largest_file(60_000):
        quartet("sft", recipe).expect_user_error("checkpoint", "could not be written")
    assert [p for p in (tmp_path / "run" / "checkpoints").iterdir()] == []
    assert quartet("sft", recipe, "--resume").status == 0


def test_damaged_checkpoints(world: Any, quartet: Any, recipes: Any, tmp_path: Path) -> None:
    """The newest is told and the one before it used; without a good one nothing is trained."""
    recipe = world.recipe("damaged", recipes["sft"](output_dir=str(tmp_path / "run")))
    assert quartet("sft", recipe).status == 0
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    newest, older = sorted((tmp_path / "run" / "checkpoints").iterdir(), reverse=True)
    for path in (newest, older):
        content = bytearray((path / "engine/__0_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (path / "engine/__0_0.distcp").write_bytes(content)
        outcome = quartet("sft", recipe, "--resume")
        if path == newest:
            assert outcome.status == 0 and "Traceback" not in outcome.err
            assert f"damaged checkpoint: {newest.name}: the content of engine/__0_0.distcp is not" in outcome.out
            assert f"the run goes on from {older.name}" in outcome.out
            assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before
            (newest / "engine/__0_0.distcp").write_bytes(content)
    outcome.expect_user_error("can be used", newest.name, older.name, "restore")


@pytest.mark.parametrize(
    ("place", "written", "shown"),
    [
        ("quartet.observe.files.RowAppender.append", "", "could not be written"),
        ("quartet.trainers.supervised.save_causal_lm", "", "model could not be written"),
        ("os.replace", "summary.json", "summary.json could not be written"),
    ],
)
def test_a_full_disk_anywhere_else(
    world: Any,
    quartet: Any,
    recipes: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    written: str,
    shown: str,
) -> None:
    """Injected where the file ``written`` is meant, because a small limit would stop the checkpoint first."""
    recipe = world.recipe("full", recipes["sft"](output_dir=str(tmp_path / "run")))
    replace = os.replace

    def full(*args: Any, **_: Any) -> None:
        if written and Path(args[1]).name != written:
            replace(*args)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(place, full)
        quartet("sft", recipe).expect_user_error(shown, "No space left on device")
    assert quartet("sft", recipe, "--resume").status == 0


def test_an_output_directory_that_holds_something_else(
    world: Any, quartet: Any, recipes: Any, tmp_path: Path, processes: Any
) -> None:
    run = tmp_path / "run"
    recipe = world.recipe("held", recipes["sft"](output_dir=str(run), steps=2))
    assert quartet("sft", recipe).status == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    quartet("sft", recipe).expect_user_error("already holds a run", "--resume")
    other = world.recipe("held_rm", recipes["reward-model"](output_dir=str(run)))
    quartet("reward-model", other, "--resume").expect_user_error("job sft", "quartet sft")
    quartet("sft", recipe, "seed=1", "--resume").expect_user_error("another recipe", "seed: 0 then, 1 now")
    assert {path: path.read_bytes() for path in before} == before
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("precious")
    quartet("sft", recipe, f"output_dir={strange}").expect_user_error("not empty", "thesis.tex")
    assert [p.name for p in strange.iterdir()] == ["thesis.tex"]
    quartet("sft", recipe, f"output_dir={strange}/thesis.tex").expect_user_error("not a directory")
    quartet("sft", recipe, f"output_dir={strange}/thesis.tex/run").expect_user_error("thesis.tex")
