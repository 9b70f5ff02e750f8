"""Processes for tests, forked from a server that has imported what they run: one of its own takes seconds to begin."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest


def context() -> ForkServerContext:
    """Makes processes from functions of these modules."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(
        [
            "growing_heap",
            "weight_ends",
            "torchrun_forks",
            "sharded_ranks",
            "sharded_models",
            "sharded_failures",
            "split_evaluation",
            "context_ranks",
            "tensor_ranks",
            "peft",
            "frozen_heap",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        # Where the server finds them: it does not have our sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return made
