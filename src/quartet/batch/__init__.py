"""Ragged batches: sequences without padding over shared segments, cut under a token budget."""

from quartet.batch.ragged import ColumnSet, RaggedBatch, join_columns

__all__ = ["ColumnSet", "RaggedBatch", "join_columns"]
