"""Ragged batches: sequences without padding over shared segments, cut under a token budget, saved whole."""

from quartet.batch.columns import ColumnSet, join
from quartet.batch.partition import plan_micro_batches, plan_tree_micro_batches
from quartet.batch.ragged import Attachment, RaggedBatch
from quartet.batch.storage import load_batch, save_batch

__all__ = [
    "Attachment",
    "ColumnSet",
    "RaggedBatch",
    "join",
    "load_batch",
    "plan_micro_batches",
    "plan_tree_micro_batches",
    "save_batch",
]
