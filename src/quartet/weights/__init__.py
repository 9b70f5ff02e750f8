"""Weights from a trainer to its rollout engines.

A ``WeightSender`` gives whole tensors, ``WeightReceiver``s take them into a ``TensorSink`` each, and one of four
transports lies between:

================ ==================================== ===========================================================
transport        the two halves                       where it fits
================ ==================================== ===========================================================
shared           ``SharedSend/Receive``               one process; zero copies
shared_memory    ``SharedMemorySend/Receive``         one machine; one copy, refreshed in place, for many engines
cuda_ipc         ``CudaIpcSend/Receive``              processes on one GPU
collective       ``CollectiveSend/Receive``           several GPUs or machines (NCCL, gloo)
================ ==================================== ===========================================================

``endpoint`` are the two ends and what they can be asked, ``control`` is the driver that asks them. ``manifest`` and
``digest`` say what was sent, ``source`` and ``sink`` are what is read and written, ``progress`` is how the ends watch
each other while data move.
"""
