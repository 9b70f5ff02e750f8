"""Weights from a trainer to its rollout engines.

``sync`` has the two ends: ``WeightSender`` offers a version and sends it, ``WeightReceiver`` takes it in one call into
a ``TensorSink``; and how the bytes come. ``sink`` also has the sender's ``NamedSource`` and a sync within one process,
``shared_memory`` the memory and the board by which ends watch each other, ``manifest`` and ``digest`` what was sent.
The driver is ``quartet.schedule.weight_sync``.
"""
