"""Episodes of several turns by an engine in a process: tokens, versions, log-probabilities and rewards are those of the
engine in the trainer's process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.config.engines import NativeEngineConfig
from served_episodes import check_episodes, run  # noqa: F401 - a fixture


@pytest.mark.usefixtures("exact_processor")
def test_a_native_engine_in_a_process_to_the_bit(run: Any) -> None:  # noqa: F811
    here, here_model, _ = run("here", NativeEngineConfig(max_running=5), "exact")
    there, there_model, rows = run("there", NativeEngineConfig(max_running=5, process=True), "exact")
    check_episodes(here)
    assert there == here
    assert all(torch.equal(a, b) for a, b in zip(here_model.parameters(), there_model.parameters(), strict=True))
    assert rows[-1]["agreement/logprob_diff_max"] == 0.0
