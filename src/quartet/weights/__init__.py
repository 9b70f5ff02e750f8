"""Weights from a trainer to its rollout engines.

``sync`` has the two ends: ``WeightSender`` offers a version and sends it, ``WeightReceiver`` takes it in one call into
a ``TensorSink``. ``transports`` bring the bytes, ``board`` is how the ends watch each other meanwhile, ``in_process``
is a sync without any of this. ``manifest`` and ``digest`` say what was sent.
The driver is ``quartet.schedule.weight_sync``.
"""
