"""What an RL step says about itself beside its losses: seconds, lengths, what memory did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quartet.batch.ragged import RaggedBatch
from quartet.observe.spans import Span, overlap_seconds, seconds_by_name
from quartet.schedule.model_worker import ModelStats
from quartet.trainers.trajectories import Trajectories, num_emitted


def timing(spans: Sequence[Span], wall_s: float, generated: int) -> dict[str, float]:
    """Seconds of each stage and of the step; ``generated`` tokens were sampled in it."""
    seconds = seconds_by_name(spans)
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found["time/step_s"] = wall_s
    found["rollout/tokens"] = float(generated)
    if seconds.get("generate"):
        # Of the bursts themselves: an engine that is ahead has sampled some of the step's tokens earlier.
        sampled = sum(span.tokens or 0 for span in spans if span.name == "generate")
        found["rollout/tokens_per_s"] = sampled / seconds["generate"]
    windows = [Span("generation", min(g), max(h)) for g, h in [_window(spans, "generate")] if g]
    scoring = [Span("scoring", s.start_s, s.end_s) for s in spans if s.chunk is not None]
    found["overlap/score_generate_s"] = overlap_seconds([*windows, *scoring], "generation", "scoring")
    return found


def _window(spans: Sequence[Span], name: str) -> tuple[list[float], list[float]]:
    picked = [s for s in spans if s.name == name]
    return [s.start_s for s in picked], [s.end_s for s in picked]


def lengths(batch: RaggedBatch) -> dict[str, float]:
    trajectories = Trajectories.of(batch)
    emitted = num_emitted(batch, trajectories)
    return {
        "rollout/length_mean": float(emitted.mean()),
        "rollout/length_max": float(emitted.max()),
        "rollout/truncated_frac": float((~batch.sequence["ended"][trajectories.final_N]).float().mean()),
        "tokens/useful": float(batch.num_tokens),
    }


def model_stats(stats: Mapping[str, ModelStats]) -> dict[str, float]:
    """Of all roles' hosts."""
    return {
        "optim/skipped_steps": float(sum(of.num_skipped for of in stats.values())),
        "train/token_budget": float(min(of.token_budget for of in stats.values() if of.token_budget)),
        "train/num_oom": float(sum(of.num_oom for of in stats.values())),
    }
