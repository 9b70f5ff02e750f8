"""`quartet data` shows what the jobs train on, says what would stop them, and reads no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from quartet.cli.main import add_plugins, app
from quartet.config import UserError
from quartet.config.load import load_recipe
from quartet.extras.data_rows.command import lines
from quartet.extras.data_rows.rows import DataRows, ShownRow, sections_of
from quartet.extras.process_rewards.trainer import ProcessRewardWorker
from quartet.trainers.devices import FrozenModels
from quartet.trainers.evaluation import EvaluationModel
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.preference import PreferenceWorker
from quartet.trainers.roles import RLRoles
from quartet.trainers.supervised import PassedObjects, RewardModelWorker, SFTWorker
from tiny_vision import picture_bytes, save_processor

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if quiet is defined %}<{{ quiet }}>{% endif %}{% endif %}"
)
USER, YES = {"role": "user", "content": "hé 🙂\tu"}, {"role": "assistant", "content": "yes\nand"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    vocab = {
        token: n for n, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"])
    }
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_start|>")
    tokenizer.chat_template = TEMPLATE
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = Qwen2Config(vocab_size=258, hidden_size=16, intermediate_size=32, num_hidden_layers=1, **heads)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def viewed(model: Path, tmp_path: Path) -> Callable[..., tuple[Any, DataRows, list[ShownRow]]]:
    """The recipe of a job with these rows, and what is shown of them."""

    def view(job: str, rows: list[Any], *overrides: str, key: str = "data") -> tuple[Any, DataRows, list[ShownRow]]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        where = "actor.model.path" if job == "rl" else "model.path"
        recipe = load_recipe(job, None, [f"{where}={model}", f"data.path={file}", "device=cpu", *overrides])
        found = DataRows(sections_of(recipe)[key], key)
        return recipe, found, list(found.rows(1, 99))

    return view


def batches(shown: list[ShownRow]) -> list[tuple[list[int], list[bool]]]:
    kept = [row for row in shown if row.spans]
    return [([n for span in row.spans for n in span.ids], [m for span in row.spans for m in span.mask]) for row in kept]


def of_worker(data: Any, mask: str) -> list[tuple[list[int], list[bool]]]:
    found = [data.select([n]) for n in range(len(data))]
    return [(batch.input_ids.tolist(), batch.token[mask].tolist()) for batch in found]


SFT = [
    {"messages": [USER, YES, USER, YES], "tools": TOOLS},
    {"prompt": "a ", "completion": "b"},
    {"text": "text"},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
]
PAIRS = [{"prompt": [USER], "chosen": "yes", "rejected": "no"}, {"prompt": "a", "chosen": "", "rejected": "c"}]


def test_sft_and_its_masks(viewed: Any) -> None:
    recipe, found, shown = viewed("sft", SFT, "data.system_prompt=kind", "model.chat_template_kwargs={quiet: 1}")
    assert batches(shown[1:]) == of_worker(found_data := _rest(SFTWorker, recipe, SFT[1:]), "loss_mask")
    assert len(found_data) == 3
    # With `quiet` an answered turn does not begin as its prompt ends.
    assert "generation prompt" in str(shown[0].error) and found.stopping.skipped.total() == 1
    recipe, _, shown = viewed("sft", SFT, "data.system_prompt=kind")
    data = SFTWorker(recipe, PassedObjects(), CPU).data
    assert batches(shown) == of_worker(data, "loss_mask")
    text = "".join(shown[0].spans[0].texts)
    assert text.startswith(json.dumps(TOOLS) + "<|im_start|>system\nkind<|im_end|>\n")
    learned = [t for t, m in zip(shown[0].spans[0].texts, shown[0].spans[0].mask, strict=True) if m]
    assert "".join(learned) == "yes\nand<|im_end|>" * 2


def _rest(worker: Any, recipe: Any, rows: list[Any]) -> Any:
    Path(recipe.data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return worker(recipe, PassedObjects(), CPU).data


def test_pairs_scores_and_judgements(viewed: Any) -> None:
    recipe, _, shown = viewed("preference", PAIRS)
    assert batches(shown) == of_worker(PreferenceWorker(recipe, PassedObjects(), CPU).data, "loss_mask")
    assert [span.title for span in shown[0].spans] == ["prompt", "chosen", "rejected"]
    recipe, _, shown = viewed("reward-model", PAIRS)
    assert [ids for ids, _ in batches(shown)] == [
        ids for ids, _ in of_worker(RewardModelWorker(recipe, PassedObjects(), CPU).data, "loss_mask")
    ]
    assert [sum(span.mask) for span in shown[0].spans] == [0, 1, 1] and shown[0].spans[1].mask[-1]
    judged = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]
    recipe, _, shown = viewed("preference", judged, "loss.name=kto")
    assert batches(shown) == of_worker(PreferenceWorker(recipe, PassedObjects(), CPU).data, "loss_mask")
    assert [row.spans[1].title for row in shown] == ["good answer", "bad answer"]


def test_pictures_are_shown_by_their_marks_and_sizes(tmp_path: Path) -> None:
    directory = save_processor("gemma3", tmp_path / "vision")
    config = json.loads((directory / "config.json").read_text())
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    (directory / "config.json").write_text(json.dumps({**config, "text_config": {"model_type": "gemma3_text", **text}}))
    files = {name: tmp_path / f"{name}.png" for name in ("a", "b")}
    for n, file in enumerate(files.values()):
        file.write_bytes(picture_bytes(40 + n, 24))
    rows = [
        {"prompt": "what?", "images": ["a.png", "b.png", "a.png"], "completion": "yes"},
        {"prompt": "what?", "image": "gone.png", "completion": "yes"},
        {"prompt": "what?", "completion": "yes"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for job, where in (("sft", "model.path"), ("rl", "actor.model.path")):
        recipe = [f"{where}={directory}", "data.bad_images=skip", f"data.path={tmp_path / 'rows.jsonl'}"]
        found = DataRows(sections_of(load_recipe(job, None, [*recipe, "device=cpu"]))["data"], "data")
        shown = list(lines(found, "data", 9, 1))
        assert any(line.startswith("row 1 ") and "(of 3 pictures)" in line for line in shown)
        text_of = "".join(line.strip() for line in shown)
        assert text_of.count("<image_soft_token>[40 × 24, 4 tokens]") == 2
        assert text_of.count("<image_soft_token>[41 × 24, 4 tokens]") == 1
        assert text_of.count("<image_soft_token>[") == 3
        assert "<image_soft_token>¦" not in text_of
        assert any("left out" in line and "a picture is not there" in line for line in shown)
        assert "2 used, 1 left out" in text_of


def test_steps_and_their_labels(viewed: Any) -> None:
    row = {"prompt": [USER], "steps": ["a", "b", "c"], "labels": [1, None, 0.5]}
    recipe, _, shown = viewed("process-reward", [row], "separator=;")
    assert batches(shown) == of_worker(ProcessRewardWorker(recipe, PassedObjects(), CPU).data, "step_mask")
    assert list(shown[0].spans[1].marks.values()) == ["1", "0.5"]


def test_prompts_as_they_are_sampled(viewed: Any, model: Path) -> None:
    rows = [{"prompt": [USER], "tools": TOOLS, "system": "own"}, {"prompt": "plain"}]
    quiet = "{quiet: false}"
    recipe, found, shown = viewed(
        "rl",
        rows,
        f"actor.model.chat_template_kwargs={quiet}",
        "algorithm.name=distillation",
        f"reference.path={model}",
        "rollout.sampling={stop_strings: ['The end'], max_new_tokens: 4}",
        "prompts_per_step=2",
    )
    roles = RLRoles(recipe, UserObjects())
    sampled = [roles.codec.encode_prompt(item.prompt) for item in roles.prompts]
    assert [ids for ids, _ in batches(shown)] == sampled
    text = "".join(shown[0].spans[0].texts)
    assert text.startswith(json.dumps(TOOLS)) and "system\nown" in text and text.endswith("assistant\n<False>")
    assert found.stops() == "answers end at <|im_end|> (257), 'The end', or after 4 tokens"
    recipe, _, shown = viewed("eval", rows, f"model.chat_template_kwargs={quiet}")
    judged = EvaluationModel(recipe.model, recipe.data, (), frozen=FrozenModels(CPU, "fp32"))
    assert [ids for ids, _ in batches(shown)] == [judged.codec.encode_prompt(item.prompt) for item in judged.prompts]


def test_what_is_left_out_and_what_stops(viewed: Any) -> None:
    rows = [
        *PAIRS,
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a" * 90, "chosen": "b", "rejected": "c"},
    ]
    recipe, found, shown = viewed("reward-model", [*rows, {"prompt": "a"}], "data.overlong=skip", "data.max_tokens=60")
    too_long = f"pair longer than 60 tokens (1 of 1, first {shown[3].place} with 92 tokens, longest 92; allowed 60)"
    assert [row.skipped for row in shown] == [None, None, "chosen and rejected are the same", too_long, None]
    assert "lacks `chosen`" in str(shown[4].error) and len(found.errors()) == 1
    assert [line.split(" (")[0] for line in found.notes()] == [
        "1 rows left out: chosen and rejected are the same",
        "1 rows left out: pair longer than 60 tokens",
    ]
    data = _rest(RewardModelWorker, recipe, rows)
    assert len(data) == len(found.lengths) == 2
    assert {line.split(" (")[0] for line in data.warnings} == {line.split(" (")[0] for line in found.notes()}
    _, found, shown = viewed("sft", [SFT[1], '{"prompt": ', SFT[1]])
    assert found.num_rows == 2 and "not valid JSON" in str(shown[1].error) and shown[1].notes


def test_sources_and_sections(viewed: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(SFT[1]) + "\n")
    more = [f"evaluation_data.path={other}"]
    _, _, shown = viewed("sft", SFT[1:3], *more, key="evaluation_data")
    assert [row.place for row in shown] == [f"{other}:1"]
    mixed = f"data={{sources: [{{path: {other}, weight: 3}}, {{path: {tmp_path / 'rows.jsonl'}, weight: 1}}]}}"
    recipe, found, shown = viewed("sft", [SFT[1]] * 3, mixed)
    assert len(shown) == 4 and found.notes() == list(SFTWorker(recipe, PassedObjects(), CPU).data.warnings)


def test_no_weights_are_read(viewed: Any, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    assert batches(viewed("sft", SFT, f"model.path={bare}")[2]) == batches(viewed("sft", SFT)[2])


# The command -----------------------------------------------------------------------------------------------


add_plugins()


def command(*words: str) -> tuple[int, str, Any]:
    result = CliRunner().invoke(app, ["data", *words])
    return result.exit_code, result.stdout, result.exception


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SFT))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"job: sft\nmodel: {{path: {model}}}\ndata: {{path: {tmp_path / 'rows.jsonl'}}}\n")
    return str(path)


def test_the_command(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.extras.data_rows.command._TOKENS", 8)
    status, out, _ = command(recipe, "--rows", "1", "--start", "2")
    assert status == 0 and "\x1b" not in out
    assert "  sequence    context     2  a¦ \n" in out and "loss        2  b¦<|im_end|>\n" in out
    assert "row 1 " not in out and "4 rows: 4 used, 0 left out" in out
    rows = [{"text": "x" * 600}, {"prompt": "a"}, {"text": "\x1b[2J" + "y" * 90}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = command(recipe, "data.overlong=skip")
    assert "context     1  \\x1b\n" in out and "\x1b" not in out and "… 86 tokens …" in out
    assert status == 1 and "stops the run: a row lacks" in out and "left out: sequence longer than 256 tokens" in out


def test_the_last_message_names_file_and_line_of_a_row_that_cannot_be_read(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text": \n')
    status, out, _ = command(recipe)
    (last,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert status == 1 and last.startswith(f"error: 1 rows stop the run: a row is not valid JSON ({file}:2: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["job=null"], "does not say which job"),
        (["--source", "ptx.data"], "no such data"),
        (["data=null"], "names no data"),
        (["model=null"], "no model"),
        (["model.chat_template=none.jinja"], "no such chat template"),
    ],
)
def test_what_cannot_be_shown(recipe: str, words: list[str], expected: str) -> None:
    error = command(recipe, *words)[2]
    assert isinstance(error, UserError) and expected in str(error)
