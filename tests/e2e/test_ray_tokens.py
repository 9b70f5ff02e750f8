"""On Ray the driver of a run holds no token ids and never makes or reads any: it is watched while whole runs go on."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import TrajectorySequence
from quartet.envs.transcript import Transcript
from quartet.observe.rollouts import read_rollout_step
from quartet.rollout.protocol import Completion
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import CheckpointShare
from quartet.train.state import REST
from quartet.trainers.rl import RLTrainer

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
RAY = {"type": "ray", "cpus_per_process": 0.1}
ASYNCHRONOUS = {
    "type": "asynchronous",
    "max_staleness": 1,
    "pools": {"engine": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "reference", "reward"]}},
}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Where in this process token ids were held, made or read while a run trained, since it was last asked.

    ``__setstate__`` notices what arrives from elsewhere. (A class never works again as before once its ``__new__`` was
    replaced: CPython leaves the slot set.)
    """
    seen: list[str] = []
    is_training = False

    def note(what: str) -> None:
        if is_training:
            seen.append(f"{what}: {''.join(traceback.format_stack(limit=6)[:-1])}")

    def watch(cls: type) -> None:
        made = cls.__init__  # type: ignore[misc]

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            note(cls.__name__)
            made(self, *args, **kwargs)

        def setstate(self: Any, state: dict[str, Any]) -> None:
            note(cls.__name__)
            self.__dict__.update(state)

        monkeypatch.setattr(cls, "__init__", init)
        monkeypatch.setattr(cls, "__setstate__", setstate, raising=False)

    def noting(method: str) -> Callable[..., Any]:
        real = getattr(TextCodec, method)

        def call(self: TextCodec, *args: Any, **kwargs: Any) -> Any:
            note(method)
            return real(self, *args, **kwargs)

        return call

    checked, train = RaggedBatch.__post_init__, RLTrainer._train

    def post_init(self: RaggedBatch) -> None:
        checked(self)
        if self.has_ids:
            note("a batch with token ids")

    async def while_training(self: RLTrainer, *args: Any) -> Any:
        nonlocal is_training
        is_training = True
        try:
            return await train(self, *args)
        finally:
            is_training = False

    for cls in (Completion, TrajectorySequence, Transcript):
        watch(cls)
    for method in ("encode_prompt", "encode_completion", "decode", "decode_completion", "token_texts"):
        monkeypatch.setattr(TextCodec, method, noting(method))
    monkeypatch.setattr(RaggedBatch, "__post_init__", post_init)
    monkeypatch.setattr(RLTrainer, "_train", while_training)
    # It looks at prompts before the first step, in this process, which reads the data.
    monkeypatch.setattr("quartet.trainers.rl.plugin_warnings", lambda *of: [])

    def take() -> list[str]:
        found = list(seen)
        seen.clear()
        return found

    return take


def grpo(recipes: Any, name: str, placement: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Held-out evaluation, a model, a function and a reference to score with, rollouts and checkpoints of each step."""
    content: dict[str, Any] = recipes["rl"](
        "grpo",
        output_dir=name,
        placement=placement,
        steps=4,
        epochs=4,
        rewards=[{"type": "model", "path": "reward_model"}, {"type": "function", "target": "rewards.py:digits"}],
        evaluation={"data": {"path": "held_out.jsonl"}, "every_steps": 2, "sampling": {"max_new_tokens": 8}},
        checkpoint={"every_steps": 1, "keep": 4},
        log={"rollouts_every": 1},
        **changes,
    )
    off_policy = {"off_policy": {}} if placement["type"] == "asynchronous" else {}
    content["algorithm"] = {"name": "grpo", "kl": {"coef": 0.05}, **off_policy}
    return content


def ahead(checkpoint: Path) -> dict[str, list[int]]:
    """Responses that a checkpoint holds, by sequence."""
    if not (checkpoint / "ahead").is_dir():
        return {}
    state = CheckpointShare(checkpoint / "ahead").state()
    if state[REST]["batch"] is None:
        return {}
    parts = {name: value for name, value in state[REST]["batch"].items() if name != "objects"}
    batch = RaggedBatch(input_ids=state["input_ids"], **parts)
    return {name: batch.input_ids[slice(*batch.leaf_span(s))].tolist() for s, name in enumerate(batch.ids)}


def test_groups_ahead_are_saved_and_taken_up_anywhere_and_no_ids_pass_through_the_driver(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], watched: Callable[[], list[str]]
) -> None:
    found = quartet("rl", world.recipe("tokens", grpo(recipes, "tokens", ASYNCHRONOUS, cluster=RAY)))
    assert found.status == 0, found.err
    assert not (seen := watched()), seen[0]
    saved = {step: ahead(Path("tokens/checkpoints") / f"step_{step:08d}") for step in (1, 2, 3)}
    step = max(step for step, held in saved.items() if held)
    for name, cluster in (("tokens-ray", {"cluster": RAY}), ("tokens-here", {})):
        shutil.copytree("tokens", name)
        for later in range(step + 1, 5):
            shutil.rmtree(Path(name) / "checkpoints" / f"step_{later:08d}")
        (Path(name) / "summary.json").unlink()
        found = quartet("rl", world.recipe(name, grpo(recipes, name, ASYNCHRONOUS, **cluster)), "--resume")
        assert found.status == 0, found.err
        seen = watched()
        assert bool(seen) == (name == "tokens-here"), seen[:1] or "the watch sees nothing at all"
        trained = {
            record.sequence_id: record.response_ids for record in read_rollout_step(Path(name) / "rollouts", step + 1)
        }
        common = saved[step].keys() & trained.keys()
        assert len(trained) == 8 and common
        assert all(trained[name] == saved[step][name] for name in common)
