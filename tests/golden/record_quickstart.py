"""Records the curves of a short quickstart: ``python tests/golden/record_quickstart.py`` writes quickstart_short.json.

Run it only after a change that is meant to change the computation, and say so in docs/log.md.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from quartet.extras.quickstart.recipes import Size
from quartet.extras.quickstart.run import Quickstart
from quartet.observe.memory import describe_processor
from quartet.observe.trackers import read_metrics

PATH = Path(__file__).with_name("quickstart_short.json")
SEED = 7
SHORT = Size(
    demonstrations=8_000,
    sft_steps=130,
    pair_prompts=60,
    reward_model_epochs=1,
    rl_prompts=64,
    rl_steps=3,
    evaluation_prompts=16,
)
"""Every stage runs, little is learned."""
STAGES = ("sft", "reward_model", "rl")
DERIVED = ("eval/longer_answer_accuracy",)
"""Left out: an interval follows from its recorded accuracy, and the lengths of answers are no result of training."""


def _make_golden() -> Any:
    spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).with_name("make_golden.py"))
    if spec is None or spec.loader is None:
        raise ImportError("make_golden.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_golden = _make_golden()
LEFT_OUT = (*make_golden.TIMED, *DERIVED)


def curves(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Every logged metric of every stage but those that are times."""
    return {
        stage: [
            {name: value for name, value in row.items() if not name.startswith(LEFT_OUT)}
            for row in read_metrics(directory / stage / "metrics.jsonl")
        ]
        for stage in STAGES
    }


def run_short(directory: Path, *, resume: bool = False) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    Quickstart(SEED, directory, size=SHORT, resume=resume).run()
    return curves(directory)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = run_short(Path(scratch) / "run")
    PATH.write_text(json.dumps({"processor": describe_processor(), "curves": found}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{PATH}\n")
