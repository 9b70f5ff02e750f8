"""The writer: what it records of a step, at once and behind the run's back, and what it says when it cannot."""

from __future__ import annotations

import errno
import gzip
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.observe import rollouts
from quartet.observe.rollouts import list_steps, read_step, rollouts_path
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import Group, answered, chunk_of, group_batch, without_texts
from quartet.schedule.leases import LOCAL_POOL, local_placement
from quartet.schedule.model_worker import Writer
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import Needs
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.workers import WRITER_ROLE, PoolWorker


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def step(codec: TextCodec, index: int, *answers: str, text_end: int | None = None) -> RaggedBatch:
    """A step of one group as the run hands it over."""
    prompt = codec.encode_prompt("3+4=")
    made = []
    for r, text in enumerate(answers):
        ids = tuple(codec.encode_prompt(text))
        logprobs, versions = tuple(-0.1 * (k + 1) for k in range(len(ids))), (index,) * len(ids)
        completion = Completion(f"{index}.{r}", f"{index}", ids, logprobs, versions, FinishReason.STOP, text_end)
        made.append(answered(prompt, completion, text))
    item = PromptItem("p3", "3+4=", {}, "here", len(prompt))
    batch = chunk_of(0, 0, [Group.of(index, item, group_batch(index, made))]).data
    return without_texts(batch.with_sequence(score=torch.arange(len(batch)).double()))


def finished(writer: Writer, step: int) -> bool:
    while (found := writer.finish_rollouts(step)) is None:
        time.sleep(0.001)
    return found


def test_what_is_written_in_the_background_is_what_is_written_at_once(run: Path, codec: TextCodec) -> None:
    writer = Writer(codec)
    steps = {number: [step(codec, 2 * number, "7", "12"), step(codec, 2 * number + 1, "5")] for number in (1, 2, 3)}
    for number, batches in steps.items():
        writer.write_rollouts(run / "rollouts", number, batches, background=True)
        writer.write_rollouts(run / "at_once", number, batches, background=False)
        assert rollouts_path(run / "at_once", number).is_file()
    assert [finished(writer, number) for number in steps] == [True] * 3
    for number in steps:
        one, other = (rollouts_path(run / name, number).read_bytes() for name in ("rollouts", "at_once"))
        assert one == other
    first, _, third = read_step(run / "rollouts", 2)
    assert (first.sequence_id, first.prompt_id, first.prompt_text, first.response_text) == ("4.0", "p3", "3+4=", "7")
    assert third.sequence_id == "5.0" and third.columns["rollout_logprobs"] == [-0.1]
    assert writer.finish_rollouts(1) is False, "told once"
    assert Writer(codec).finish_rollouts(1) is False, "this one was started after another one's death"


def test_a_response_is_shown_up_to_its_stop_string(run: Path, codec: TextCodec) -> None:
    batches = [step(codec, 1, "12", text_end=1), step(codec, 2, "12"), step(codec, 3, "12", text_end=0)]
    Writer(codec).write_rollouts(run / "rollouts", 1, batches, background=False)
    records = read_step(run / "rollouts", 1)
    assert [record.response_text for record in records] == ["1", "12", ""]
    assert [record.response_tokens for record in records] == [["1", "2"]] * 3


def test_a_refused_file_is_told_by_its_own_step_alone(
    run: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rollouts.replace_atomically

    def full(path: Path, content: bytes) -> None:
        if path == rollouts_path(run / "rollouts", 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(rollouts, "replace_atomically", full)
    writer = Writer(codec)
    for number in (1, 2, 3):
        writer.write_rollouts(run / "rollouts", number, [step(codec, number, "7")], background=True)
    assert finished(writer, 3)
    with pytest.raises(UserError, match=r"step_000002.jsonl.gz could not be written") as caught:
        writer.finish_rollouts(2)
    assert "No space left on device" in caught.value.found
    assert finished(writer, 1) and list_steps(run / "rollouts") == [1, 3]
    with pytest.raises(UserError, match="could not be written"):
        writer.write_rollouts(run / "rollouts", 2, [step(codec, 2, "7")], background=False)


@pytest.mark.parametrize("background", [False, True])
def test_a_directory_that_is_not_there_is_refused_and_not_made(run: Path, codec: TextCodec, background: bool) -> None:
    with pytest.raises(UserError, match="does not see the run's directory"):
        Writer(codec).write_rollouts(run / "missing" / "rollouts", 1, [step(codec, 1, "7")], background=background)
    assert not list(run.iterdir())


def test_a_step_that_is_done_again_replaces_its_file(run: Path, codec: TextCodec) -> None:
    writer = Writer(codec)
    for answer in ("7", "8"):
        writer.write_rollouts(run / "rollouts", 1, [step(codec, 1, answer)], background=True)
    assert finished(writer, 1)
    assert [record.response_text for record in read_step(run / "rollouts", 1)] == ["8"]
    assert gzip.decompress(rollouts_path(run / "rollouts", 1).read_bytes()).count(b"\n") == 1


def test_an_outline_is_no_record(run: Path, codec: TextCodec) -> None:
    batch = step(codec, 1, "7")
    with pytest.raises(ValueError):
        Writer(codec).write_rollouts(run / "rollouts", 1, [batch.outline(["far"])], background=False)
    whole = batch.outline(["far"]).filled([batch])
    Writer(codec).write_rollouts(run / "rollouts", 1, [whole], background=False)
    assert [record.response_text for record in read_step(run / "rollouts", 1)] == ["7"]


def test_a_reward_model_may_be_called_writer(tmp_path: Path, causal_lm: Any, scalar_model: Any, tokenizer: Any) -> None:
    """Where it is in the actor's process it stood under the writer's own name."""
    for name, model in (("policy", causal_lm()), ("judge", scalar_model())):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    recipe = RLRecipe(
        actor={"model": {"path": str(tmp_path / "policy")}},
        data={"path": "unused.jsonl"},
        rewards=[{"type": "model", "name": "writer", "path": str(tmp_path / "judge")}],
    )
    placement = local_placement(("actor", "writer"))
    process = PoolWorker(recipe, UserObjects(), placement, LOCAL_POOL, str(Path.cwd()))
    batch = RaggedBatch.from_groups([[3, 4]], [[[5], [6, 7]]], ["a", "b"])
    scores = process.run_role("writer", "forward", batch, Needs(scores=True))
    assert scores.ids == batch.ids and len(scores.sequence["scores"]) == 2
    assert process.run_role(WRITER_ROLE, "finish_rollouts", 1) is False
