"""Four workers, each of which holds its rank and adds what it is told to.

python examples/accumulators.py [address of a Ray cluster]
"""

import sys

from quartet.cluster import BROADCAST, ResourcePool, Worker, WorkerGroup, connect, dispatch


class Accumulator(Worker):
    def __init__(self) -> None:
        self.value = self.rank

    @dispatch(BROADCAST)
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


if __name__ == "__main__":
    with connect(*sys.argv[1:]):
        group = WorkerGroup(ResourcePool([4], cpus=0.1), Accumulator)
        print(group.add(1))  # [1, 2, 3, 4]
