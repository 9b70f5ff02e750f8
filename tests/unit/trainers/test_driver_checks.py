"""Models of an RL run that cannot be cut as its recipe says are refused by the driver, before Ray is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.roles import RLRoles

NOWHERE = {"type": "ray", "address": "127.0.0.1:1"}


def expect_refusal(raised: pytest.ExceptionInfo[UserError], sizes: dict[str, int]) -> None:
    tensor = "sharding.tensor: 3; 2 attention heads", "the nearest that divide all of them: sharding.tensor 1 or 2"
    context = "2 heads, sharding.tensor 1 × sharding.context 3 = 3", "choose tensor × context among 1, 2"
    found, remedy = tensor if "tensor" in sizes else context
    assert found in raised.value.found and remedy in raised.value.remedy, str(raised.value)


@pytest.mark.parametrize("sizes", [{"tensor": 3}, {"context": 3}], ids=str)
@pytest.mark.parametrize("role", ["actor", "critic", "reference", "reward"])
def test_every_role_of_rl(
    role: str, sizes: dict[str, int], causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    scalar_model().save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    reward: dict[str, Any] = {"type": "model", "path": str(tmp_path / "rm")}
    values = {role: {"sharding": sizes}} if role != "reward" else {}
    recipe = RLRecipe(
        algorithm={"name": "ppo"},
        cluster=NOWHERE,
        placement={"type": "full_offload", "pool": {"processes": 3}},
        rewards=[reward | ({"sharding": sizes} if role == "reward" else {})],
        **values,
    )
    objects = UserObjects(causal_lm(), tokenizer, prompts=prompts).on_meta()
    with pytest.raises(UserError, match=rf"^{role}(_model)?: Qwen2\w+ cannot") as raised:
        RLRoles(recipe, objects)
    expect_refusal(raised, sizes)
