"""The writer: what it records of a step, at once and behind the run's back, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.data.datasets import PromptItem
from quartet.observe import rollouts
from quartet.observe.rollouts import list_rollout_steps, read_rollout_step, rollouts_path
from quartet.rollout.protocol import Completion, FinishReason
from quartet.schedule.groups import PromptGroup, drop_texts, group_batch, make_chunk, single_turn_trajectory
from quartet.schedule.model_worker import RolloutWriter
from quartet.text.pictures import Picture, PictureCodec, PictureProcessor, PictureStore
from quartet.text.tokenizer import TextCodec
from tiny_vision import picture_bytes, save_processor


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
        made.append(single_turn_trajectory(prompt, completion, text))
    item = PromptItem("p3", "3+4=", {}, "here", len(prompt))
    batch = make_chunk(0, 0, [PromptGroup.of(index, item, group_batch(index, made))]).data
    return drop_texts(batch.with_sequence(score=torch.arange(len(batch)).double()))


def finished(writer: RolloutWriter, step: int) -> bool:
    while (found := writer.finish_rollouts(step)) is None:
        time.sleep(0.001)
    return found


def test_what_is_written_in_the_background_is_what_is_written_at_once(run: Path, codec: TextCodec) -> None:
    writer = RolloutWriter(codec)
    steps = {number: [step(codec, 2 * number, "7", "12"), step(codec, 2 * number + 1, "5")] for number in (1, 2, 3)}
    for number, batches in steps.items():
        writer.write_rollouts(run / "rollouts", number, batches, background=True)
        writer.write_rollouts(run / "at_once", number, batches, background=False)
        assert rollouts_path(run / "at_once", number).is_file()
    assert [finished(writer, number) for number in steps] == [True] * 3
    for number in steps:
        one, other = (rollouts_path(run / name, number).read_bytes() for name in ("rollouts", "at_once"))
        assert one == other
    first, _, third = read_rollout_step(run / "rollouts", 2)
    assert (first.sequence_id, first.prompt_id, first.prompt_text, first.response_text) == ("4.0", "p3", "3+4=", "7")
    assert third.sequence_id == "5.0" and third.columns["rollout_logprobs"] == [-0.1]
    assert writer.finish_rollouts(1) is False, "told once"
    assert RolloutWriter(codec).finish_rollouts(1) is False, "this one was started after another one's death"


def test_a_response_is_shown_up_to_its_stop_string(run: Path, codec: TextCodec) -> None:
    batches = [step(codec, 1, "12", text_end=1), step(codec, 2, "12"), step(codec, 3, "12", text_end=0)]
    RolloutWriter(codec).write_rollouts(run / "rollouts", 1, batches, background=False)
    records = read_rollout_step(run / "rollouts", 1)
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
    writer = RolloutWriter(codec)
    for number in (1, 2, 3):
        writer.write_rollouts(run / "rollouts", number, [step(codec, number, "7")], background=True)
    assert finished(writer, 3)
    with pytest.raises(UserError, match=r"step_000002.jsonl.gz could not be written") as caught:
        writer.finish_rollouts(2)
    assert "No space left on device" in caught.value.found
    assert finished(writer, 1) and list_rollout_steps(run / "rollouts") == [1, 3]
    with pytest.raises(UserError, match="could not be written"):
        writer.write_rollouts(run / "rollouts", 2, [step(codec, 2, "7")], background=False)


def test_pictures_are_named_and_have_one_piece_of_text_each(run: Path, tmp_path: Path) -> None:
    path = save_processor("qwen2_vl", tmp_path / "model")
    pictures = PictureCodec(PictureProcessor.load(path), PictureStore(run / "pictures"))
    codec = replace(TextCodec.from_pretrained(path), pictures=pictures)
    shown = Picture(picture_bytes(32, 32))
    content = [{"type": "image", "image": shown}, {"type": "text", "text": "hello"}]
    prompt = codec.encode_prompt([{"role": "user", "content": content}])
    key = pictures.processor.key(shown)
    answer = tuple(codec.encode_continuation("yes"))
    completion = Completion("1.0", "1", answer, (-0.1,) * len(answer), (1,) * len(answer), FinishReason.STOP, None)
    item = PromptItem("p3", "hello", {}, "here", len(prompt))
    turn = single_turn_trajectory(prompt, completion, "yes")
    batch = make_chunk(0, 0, [PromptGroup.of(1, item, group_batch(1, [turn]))]).data
    batch = drop_texts(batch.with_sequence(score=torch.zeros(1).double()))
    RolloutWriter(codec).write_rollouts(run / "rollouts", 1, [batch], background=False)
    (record,) = read_rollout_step(run / "rollouts", 1)
    assert record.pictures == [f"{key:012x}"] and (run / "pictures" / record.pictures[0]).is_file()
    assert record.prompt_ids == prompt and len(record.prompt_tokens) == len(prompt)
    assert record.prompt_text.count("<|image_pad|>") == 1 and record.prompt_tokens.count("<|image_pad|>") == 1
    assert record.response_text == "".join(record.response_tokens) == "yes"
