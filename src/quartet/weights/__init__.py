"""Weights from a trainer to its rollout engines.

A ``WeightSource`` gives whole tensors, a sink takes them, and one of five transports lies between:

================ ============================= ==================================================================
transport        the two halves                where it fits
================ ============================= ==================================================================
shared           ``SharedSender``              one process; zero copies
shared_memory    ``SharedMemoryOutlet/Inlet``  one machine; one copy, refreshed in place, served by many engines
cuda_ipc         ``CudaIpcOutlet/Inlet``       processes on one GPU
collective       ``CollectiveOutlet/Inlet``    several GPUs or machines (NCCL, gloo)
disk             ``DiskOutlet/Inlet``          engines that only load files; engines that start later
================ ============================= ==================================================================

``manifest`` and ``digest`` say what is on the wire, ``source`` and ``sink`` are the ends, ``fusion`` is the change of
layout between them, ``control``, ``exchange`` and ``session`` are the protocol that all transports but ``shared`` have.
"""

from quartet.weights.collective import CollectiveInlet, CollectiveOutlet
from quartet.weights.control import Address
from quartet.weights.cuda_ipc import CudaIpcInlet, CudaIpcOutlet
from quartet.weights.digest import Hasher
from quartet.weights.disk import DiskInlet, DiskOutlet, load_published, published
from quartet.weights.errors import (
    WeightMismatch,
    WeightsRefused,
    WeightsUnusable,
    WeightSyncError,
    WeightSyncTimeout,
)
from quartet.weights.fusion import GATE_UP, FusedProjection, qkv, split_fused
from quartet.weights.manifest import Manifest, TensorSpec
from quartet.weights.session import Receiver, Sender, WeightSender
from quartet.weights.shared import SharedSender
from quartet.weights.shared_memory import SharedMemoryInlet, SharedMemoryOutlet
from quartet.weights.sink import Status, TensorSink, WeightSink
from quartet.weights.source import GatherWatch, NamedSource, WeightSource, take_part

__all__ = [
    "GATE_UP",
    "Address",
    "CollectiveInlet",
    "CollectiveOutlet",
    "CudaIpcInlet",
    "CudaIpcOutlet",
    "DiskInlet",
    "DiskOutlet",
    "FusedProjection",
    "GatherWatch",
    "Hasher",
    "Manifest",
    "NamedSource",
    "Receiver",
    "Sender",
    "SharedMemoryInlet",
    "SharedMemoryOutlet",
    "SharedSender",
    "Status",
    "TensorSink",
    "TensorSpec",
    "WeightMismatch",
    "WeightSender",
    "WeightSink",
    "WeightSource",
    "WeightSyncError",
    "WeightSyncTimeout",
    "WeightsRefused",
    "WeightsUnusable",
    "load_published",
    "published",
    "qkv",
    "split_fused",
    "take_part",
]
