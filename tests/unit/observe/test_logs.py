"""Python's logging: role and rank in every record, the level of the recipe, and nobody else's loggers touched."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quartet.observe.process import logging_variables, set_up_logging


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    logger = logging.getLogger("quartet")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1], before[2]


def test_records_have_role_and_rank_once(capsys: pytest.CaptureFixture) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("transformers").level)
    set_up_logging("info", "driver")
    set_up_logging("info", "actor+reference", 3)  # another run in the same process
    logging.getLogger("quartet.trainers.run").info("saved %d", 7)
    logging.getLogger("quartet.trainers.run").debug("not this")
    text = capsys.readouterr().err
    assert re.fullmatch(r"\S+ \S+ INFO \[actor\+reference 3\] quartet\.trainers\.run: saved 7\n", text)
    assert before == (root.level, root.handlers, logging.getLogger("transformers").level)


def test_a_started_process_has_level_role_and_rank_of_its_own() -> None:
    set_up_logging("debug", "driver")
    code = "import quartet, logging; logging.getLogger('quartet.rollout').debug('here')"
    variables = {**os.environ, **logging_variables("vllm engine", 1)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert "DEBUG [vllm engine 1] quartet.rollout: here" in done.stderr
