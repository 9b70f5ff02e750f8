"""`quartet doctor` by the command line: every RL recipe of recipes/, a recipe with faults, workers on Ray."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("recipes_of_tests", Path(__file__).with_name("test_recipes.py"))
assert _SPEC is not None and _SPEC.loader is not None
of_recipes: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(of_recipes)
place = of_recipes.place
"""The fixture: models and data under the names that recipes have for them."""
NAMES = [name for name, content in of_recipes.CONTENTS.items() if content["job"] == "rl"]
SHORT = "rollout.sampling.max_new_tokens=64"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i % 4 else []) for i, name in enumerate(NAMES)]
)
def test_recipes_are_well(name: str, place: Path, quartet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    found = of_recipes.COMMAND.search(of_recipes.TEXTS[name])
    short = (*of_recipes.SHORTER.get(name, ()), SHORT, "threads=1", f"output_dir=out/{name}")
    done = quartet("doctor", f"recipes/{name}.yaml", *shlex.split(found[3]), *short, "--json", "--max-new-tokens", "16")
    assert done.out, done.err
    told = json.loads(done.out)
    assert done.status == 0 and told["failure"] == 0, told
    unwell = {one["name"] for one in told["findings"] if one["status"] != "ok"}
    # A model that answers with digits tells no story.
    assert unwell <= ({"reward_spread"} if name.startswith("story") else set())
    assert told["ok"] + told["warning"] == len(told["findings"]) == 25
    assert not (place / "out" / name).exists()


def test_faults_have_status_1_and_a_line_each(place: Path, quartet: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def turned(completions, answer, **_):\n    return [-float(c == a) for c, a in zip(completions, answer)]\n"
    )
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"job: rl\nthreads: 1\nactor: {{model: {{path: '{place}/DIR'}}}}\nalgorithm: {{name: rloo}}\n"
        f"data: {{path: '{tmp_path}/rows.jsonl'}}\nprompts_per_step: 4\n"
        f"rewards: [{{type: function, target: '{tmp_path}/reward.py:turned'}}]\n"
        "rollout: {sampling: {max_new_tokens: 8}}\n",
        encoding="utf-8",
    )
    done = quartet("doctor", str(recipe))
    assert done.status == 1
    lines = done.out.splitlines()
    wrong = [line for line in lines if line.startswith("failure")]
    assert [line.split()[1] for line in wrong] == ["reward_answers"] and "; do: see that the reward reads" in wrong[0]
    assert lines[-1] == "24 ok, 0 warning, 1 failure"
    quartet("doctor", str(recipe), "nonsense=1").expect_user_error("nonsense")


def test_workers_and_engines_on_ray(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], read_by_workers: Any
) -> None:
    roles: dict[str, Any] = {role: {} for role in ("actor", "critic", "reference", "reward")}
    placement = {"type": "separated", **roles, "rollout": {"processes": 2}}
    cluster = {"type": "ray", "cpus_per_process": 0.1}
    recipe = recipes["rl"](output_dir="ray-doctor", placement=placement, cluster=cluster, **read_by_workers)
    done = quartet("doctor", world.recipe("ray-doctor", recipe), "--json")
    told = json.loads(done.out)
    found = {one["name"]: one for one in told["findings"]}
    assert told["failure"] == 0, told
    assert "0 of 2 engines" in found["weight_update"]["found"]
