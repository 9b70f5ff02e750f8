"""Ragged batches: sequences without padding over shared segments, cut under a token budget."""

from quartet.batch.columns import ColumnSet, join
from quartet.batch.ragged import RaggedBatch

__all__ = ["ColumnSet", "RaggedBatch", "join"]
