"""Engines ``sglang`` and ``server`` in recipes: their keys, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.common import SamplingConfig
from quartet.config.load import load_recipe
from quartet.config.recipe import RLRecipe, RolloutConfig
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.extras.speculation.config import HistorySpeculation

SGLANG = SGLangEngineConfig(urls=("http://127.0.0.1:1",), weights_directory="/w")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engine={type: server, urls: ['ftp://h'], model: m}", "http://host:port"),
        ("rollout.engine={type: server, urls: [], model: m}", "rollout.engine.urls"),
        ("rollout.engine={type: server, urls: ['http://h:1'], model: m}", "takes no weights"),
        ("rollout.engine={type: sglang, urls: ['http://h:1']}", "needs weights_directory"),
    ],
)
def test_mistakes_are_told(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("rl", None, [override])
    assert said in f"{caught.value.found} {caught.value.remedy}"


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"speculation": HistorySpeculation()}, "which native and vllm do; found rollout.engine sglang"),
        ({"sampling": SamplingConfig(draw="gumbel")}, "rollout.sampling.draw gumbel needs this project's"),
        ({"sampling": SamplingConfig(top_k=5, truncated_logprobs=True)}, "is for native and vllm"),
    ],
)
def test_what_needs_our_sampler_is_refused(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        RLRecipe(rollout=RolloutConfig(engine=SGLANG, **section))


def test_a_server_with_one_model_does_not_answer_for_two() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("eval", None, ["engine={type: server, urls: ['http://h:1'], model: m}", "compare.model=other"])
    assert "would answer for compare.model" in f"{caught.value.found} {caught.value.remedy}"
