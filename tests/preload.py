"""What a run imports, imported once: what is forked from this process computes after milliseconds, not seconds."""

from __future__ import annotations

import gc
import importlib
import os

MODULES = (
    "fsspec",
    "quartet.cli.main",
    "quartet.cli.show",
    "quartet.cluster.torchrun",
    "quartet.extras.report",
    "quartet.trainers.evaluation",
    "quartet.trainers.evaluation",
    "quartet.extras.speculation.job",
    "quartet.trainers.preference",
    "quartet.extras.process_rewards.trainer",
    "quartet.trainers.supervised",
    "quartet.trainers.rl",
    "quartet.trainers.supervised",
    "rich.console",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.event_file_writer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)


def load() -> None:
    """Without a second thread, which would be missing after a fork."""
    gc.disable()  # of what is imported nothing is garbage, and walking it again and again takes a fifth of the time
    for module in MODULES:
        importlib.import_module(module)
    # A fifth of a second of regular expressions, compiled at the first model.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    gc.enable()
