"""A loss over a batch that is split over workers, each of which works on its part.

python examples/data_parallel_loss.py [address of a Ray cluster]
"""

import sys

import torch
from torch import Tensor

from quartet.batch import RaggedBatch
from quartet.cluster import SPLIT, ResourcePool, Worker, WorkerGroup, connect, dispatch


class Trainer(Worker):
    def __init__(self, vocab_size: int) -> None:
        torch.manual_seed(0)
        self.logits = torch.randn(vocab_size, vocab_size)

    @dispatch(SPLIT)
    def loss(self, batch: RaggedBatch) -> Tensor:
        """One loss per sequence."""
        tokens = batch.input_ids.split(batch.segment_lengths)
        return torch.stack([torch.nn.functional.cross_entropy(self.logits[t[:-1]], t[1:]) for t in tokens])


if __name__ == "__main__":
    batch = RaggedBatch.from_sequences([[1, 2, 3], [4, 5, 6, 7, 8], [9, 3], [2, 7, 1, 8]])
    with connect(*sys.argv[1:]):
        group = WorkerGroup(ResourcePool([2], cpus=0.1), Trainer, 10)
        print(group.loss(batch))  # four losses, in the batch's order
