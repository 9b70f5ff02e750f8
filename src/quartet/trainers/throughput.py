"""How fast a step was, on what its devices could do, and how much memory and wire it took."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.models.work import Work


def throughput(
    seconds: float, *, samples: int, tokens: int, devices: int, works: Mapping[str, Work]
) -> dict[str, float]:
    """Metrics of a step.

    Args:
        samples: responses, or rows of a supervised job, that the step trained on.
        tokens: of these, a shared prompt once.
        devices: processes of the run, each of which has one.
        works: of every role with a model, what its processes computed in the step.
    """
    whole = Work.joined(works.values())
    found = {
        "throughput/samples_per_s": samples / seconds,
        "throughput/samples_per_s_per_device": samples / seconds / devices,
        "throughput/tokens_per_s_per_device": tokens / seconds / devices,
        "throughput/collective_bytes": float(whole.sent_bytes),
    }
    if whole.computed_tokens:
        found["throughput/useful_token_share"] = whole.useful_tokens / whole.computed_tokens
    for role, work in works.items():
        if work.flops and work.seconds:
            found[f"throughput/tflops/{role}"] = work.flops / work.seconds / 1e12
            if work.possible_flops is not None:
                found[f"throughput/mfu/{role}"] = work.flops / work.possible_flops
    if whole.host_peak_bytes:
        found["memory/host_peak_bytes"] = float(whole.host_peak_bytes)
    if whole.device_peak_bytes:
        found["memory/device_peak_bytes"] = float(whole.device_peak_bytes)
    return found
