"""The results of ``run.py`` as markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def text(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row[key])


def yes(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "yes" if row[key] else "no"


def number(key: str, scale: float = 1.0, digits: int = 1) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        return "–" if value is None else f"{value * scale:,.{digits}f}"

    return cell


MEMORY: Column = ("peak GB", number("peak_bytes", 1e-9))
TRAINING: list[Column] = [
    ("model", text("model")), ("batch", text("layout")), ("fused", yes("fused")),
    ("tokens", number("useful_tokens", 1, 0)), ("ms", number("seconds", 1e3, 0)), ("MFU %", number("mfu", 100)),
    ("% of GEMM rate", number("share_of_gemm_rate", 100)), MEMORY,
]  # fmt: skip
ROLLOUT: list[Column] = [
    ("model", text("model")),
    ("tokens/s", number("tokens_per_s", 1, 0)), ("ms/step", number("step_s", 1e3, 2)),
    ("bound ms", number("bound_s", 1e3, 2)), ("% of bound", number("share_of_bound", 100)),
    ("x generate", number("times_generate", 1, 2)), MEMORY,
]  # fmt: skip
STEP: list[Column] = [
    ("model", text("model")), ("method", text("method")), ("s/step", number("seconds", 1, 2)),
    ("generate s", number("generate_s", 1, 2)), ("update s", number("update_s", 1, 2)),
    ("critic's s", number("update_critic_s", 1, 2)), ("samples/s", number("samples_per_s")),
    ("new tokens", number("new_tokens", 1, 0)), ("x TRL", number("times_trl", 1, 2)), ("MFU %", number("mfu", 100)),
    ("mean log-prob difference", number("logprob_diff_mean", 1, 5)), ("largest", number("logprob_diff_max", 1, 5)),
    MEMORY,
]  # fmt: skip


def largest(row: Mapping[str, Any]) -> str:
    return "; ".join(f"`{name}` {seconds * 1e3:,.1f}" for name, seconds in row["largest"].items())


KERNELS: list[Column] = [
    ("model", text("model")), ("work", text("work")), ("ms", number("seconds", 1e3)),
    ("device busy ms", number("busy_s", 1e3)), ("kernels", number("num_kernels", 1, 0)), ("largest, ms", largest),
]  # fmt: skip
SHARDED: list[Column] = [
    ("model", text("model")), ("processes", text("processes")), ("shard", text("shard")), ("context", text("context")),
    ("tensor", text("tensor")), ("batch", text("layout")),
    ("tokens", number("useful_tokens", 1, 0)), ("ms", number("seconds", 1e3, 0)),
    ("tokens/s per GPU", number("tokens_per_s_per_device", 1, 0)), ("MFU %", number("mfu", 100)),
    ("GB sent by a rank", number("sent_bytes", 1e-9, 2)), MEMORY, ("host peak GB", number("host_peak_bytes", 1e-9)),
]  # fmt: skip


def markdown(results: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items() if value is not None)
    peak = results["peak_flops"]
    rates = [
        f"GEMM {results['gemm_flops'] / 1e12:.1f} TFLOP/s bf16 measured",
        f"peak {peak / 1e12:.0f} by data sheet" if peak else "no data sheet for this device",
        f"copy {results['bandwidth'] / 1e12:.2f} TB/s measured",
    ]
    parts = ["# GPUs", machine + ".", "; ".join(rates) + "."]
    if results["smoke"]:
        parts.append("A smoke run on a tiny model: the figures mean nothing.")
    found = results["parts"]
    if results["left_out"]:
        parts.append("Left out: " + "; ".join(results["left_out"]) + ".")
    if found.get("sharded"):
        parts += ["## Training on several GPUs", table(SHARDED, found["sharded"])]
    if found.get("training"):
        parts += ["## Training", table(TRAINING, found["training"])]
    if found.get("rollout"):
        parts += ["## Rollout", table(ROLLOUT, [row for entry in found["rollout"] for row in entry["engine"]])]
        lines = [f"{g['model']}: {g['tokens_per_s']:,.0f} tokens/s" for g in (e["generate"] for e in found["rollout"])]
        parts.append("`generate`: " + "; ".join(lines) + ".")
    if found.get("step"):
        parts += ["## Whole RL steps", table(STEP, found["step"])]
    if found.get("kernels"):
        parts += ["## Where the time goes", table(KERNELS, found["kernels"])]
    return "\n\n".join(parts) + "\n"
