"""How far sampler and trainer differ in fp32, fp16 and bf16, and what a clip would make of it.

    python benchmarks/precision.py [--model small] [--responses 64] [--length 128] [--threads 2]

A random model with logits as spread as a language model's generates with the native engine and is then asked for the
log-probabilities of the very same tokens by the trainer's forward pass: one policy, two programs, so every ratio should
be 1. Shown are the ratio's deviation and largest distance from 1, the tokens outside PPO's clip (0.2) and the answers
whose product of ratios is outside RLOO's; then the clipped fraction that training really had on its first
mini-batch, where ``old`` is the trainer's own forward.

A second table is about models that are never trained: what holding their weights in bf16 does to their results, beside
fp32 weights under bf16 autocast, and to their bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from common import (
    MODELS,
    arguments,
    build_model,
    markdown,
    prompt_ids,
    step_groups,
    write_results,
)

from quartet.algorithms.segments import segment_sum
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import PPO, RLOO, KLConfig, PolicyGradient
from quartet.config.common import TrainConfig
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams
from quartet.schedule.model_worker import local_model_bytes
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import PolicyObjective
from quartet.trainers.evaluation import run_requests

GROUP_SIZE = 4
CLIP = 0.2
LOGIT_STD = 3.0
"""Standard deviation of the logits over the vocabulary; an untrained head's is far below a language model's."""
KINDS = {
    "fp32": (torch.float32, "fp32"),
    "fp16 weights": (torch.float16, "fp32"),
    "bf16 weights": (torch.bfloat16, "fp32"),
    "bf16 (`precision: bf16`, fp32 weights)": (torch.float32, "bf16"),
}
"""Dtype of the weights, and the recipe's precision over them."""


def spread_model(name: str, dtype: torch.dtype) -> Any:
    """The benchmarks' model with its last norm scaled until logits have ``LOGIT_STD``."""
    model = build_model(name)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 67).unsqueeze(0)).logits
        model.model.norm.weight.mul_(LOGIT_STD / logits.std(-1).mean())
    return model.to(dtype)


def rollout(packed: PackedCausalLM, num_responses: int, length: int) -> RaggedBatch:
    """Prompts and their sampled responses, with the engine's log-probabilities."""
    groups = step_groups(max(1, num_responses // GROUP_SIZE), GROUP_SIZE, length)
    prompts = prompt_ids(groups, packed.vocab_size)
    sampling = SamplingParams(max_new_tokens=length)
    requests = [
        Request(f"{p}.{r}", str(p), tuple(ids), SamplingParams(**{**vars(sampling), "seed": 100 * p + r}))
        for p, ids in enumerate(prompts)
        for r in range(GROUP_SIZE)
    ]
    done = run_requests(NativeEngine(packed, max_running=64), requests)
    by_prompt = [done[p * GROUP_SIZE : (p + 1) * GROUP_SIZE] for p in range(len(prompts))]
    batch = RaggedBatch.from_groups(
        prompts, [[c.token_ids for c in row] for row in by_prompt], [request.request_id for request in requests]
    )
    sampled = torch.zeros(batch.num_tokens)
    for s, completion in enumerate(done):
        start, stop = batch.leaf_span(s)
        sampled[start:stop] = torch.tensor(completion.logprobs)
    mask = batch.sequence_index() >= 0
    return batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=sampled).with_sequence(
        trajectory=torch.arange(len(batch))
    )


def clipped_in_training(kind: str, model: str, batch: RaggedBatch, algorithm: PolicyGradient) -> float:
    """What the first mini-batch of a step clips, by a fresh trainer."""
    dtype, precision = KINDS[kind]
    packed = PackedCausalLM(spread_model(model, dtype), precision)
    engine = TrainEngine(packed, TrainConfig(precision=precision, token_budget=2048), total_steps=1)
    objective = PolicyObjective(algorithm, len(batch), 1.0, kl_coef=0.0, is_first=True, max_new_tokens=1)
    metrics = engine.train_step(batch, objective)
    if metrics["policy/ratio_max"] != 1.0:
        raise SystemExit(f"{kind}: the first ratio is {metrics['policy/ratio_max']}, not 1")
    return metrics["policy/clip_frac_numerical"]


def measure(kind: str, args: Any) -> dict[str, Any]:
    dtype, precision = KINDS[kind]
    packed = PackedCausalLM(spread_model(args.model, dtype), precision)
    num_responses, length = (8, 8) if args.smoke else (args.responses, args.length)
    batch = rollout(packed, num_responses, length)
    engine = TrainEngine(packed, TrainConfig(precision=precision), total_steps=1)
    logprobs = engine.forward(batch, ForwardNeeds(logprobs=True, mask="action_mask")).token["logprobs"].float()
    packed.release()
    mask, owner = batch.token["action_mask"], batch.sequence_index()
    log_ratio = torch.where(mask, logprobs - batch.token["rollout_logprobs"], 0.0)
    ratios = log_ratio[mask].exp()
    products = segment_sum(log_ratio, owner, len(batch)).exp()
    generator = torch.Generator().manual_seed(0)
    signs = torch.where(torch.rand(len(batch), generator=generator) < 0.5, -1.0, 1.0)
    with_advantages = batch.with_token(advantages=torch.where(mask, signs[owner.clamp(min=0)], 0.0))
    no_kl = KLConfig(coef=0.0)
    return {
        "kind": kind,
        "tokens": int(mask.sum()),
        "answers": len(batch),
        "std": float(ratios.std()),
        "largest": float((ratios - 1).abs().max()),
        "tokens_outside": float(((ratios - 1).abs() > CLIP).float().mean()),
        "answers_std": float(products.std()),
        "answers_outside": float(((products - 1).abs() > CLIP).float().mean()),
        "clipped_ppo": clipped_in_training(kind, args.model, with_advantages, PPO(kl=no_kl)),
        "clipped_rloo": clipped_in_training(kind, args.model, with_advantages, RLOO(kl=no_kl)),
    }


HOLDINGS = {
    "linear weights in bf16 (`PackedModel.freeze`)": lambda packed: packed.freeze(),
    "all weights in bf16, heads in fp32": lambda packed: packed.body.to(torch.bfloat16),
}
"""How a frozen model may hold its weights, in place of fp32 under autocast."""


def measure_frozen(holding: str, args: Any) -> dict[str, Any]:
    """How far log-probabilities and scores move from those of fp32 weights under bf16 autocast, and what is saved."""
    num_responses, length = (8, 8) if args.smoke else (args.responses, args.length)
    groups = step_groups(max(1, num_responses // GROUP_SIZE), GROUP_SIZE, length)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {"holding": holding}
    for kind, needs in (("logprobs", ForwardNeeds(logprobs=True)), ("scores", ForwardNeeds(scores=True))):
        model = spread_model(args.model, torch.float32)
        if kind == "scores":
            model = scalar_model_from(model, seed=0)
        packed = (PackedScalarModel if kind == "scores" else PackedCausalLM)(model, "bf16")
        vocabulary = model.get_input_embeddings().weight.shape[0]
        prompts = prompt_ids(groups, vocabulary)
        answers = [
            [torch.randint(vocabulary, (length,), generator=generator).tolist() for _ in "answers"] for _ in prompts
        ]
        batch = RaggedBatch.from_groups(prompts, answers, [str(n) for n in range(sum(map(len, answers)))])
        batch = batch.with_token(loss_mask=batch.sequence_index() >= 0)
        before, bytes_before = _frozen_values(packed, batch, needs), local_model_bytes(packed)
        HOLDINGS[holding](packed)
        differences = (_frozen_values(packed, batch, needs) - before).abs()
        found[kind] = {
            "mean": float(differences.mean()),
            "largest": float(differences.max()),
            "spread": float(before.std()),
            "bytes": local_model_bytes(packed) / bytes_before,
        }
    return found


def _frozen_values(packed: Any, batch: RaggedBatch, needs: ForwardNeeds) -> torch.Tensor:
    columns = forward_only(packed, batch, needs, 4096)
    return columns.token["logprobs"][batch.token["loss_mask"]] if needs.logprobs else columns.sequence["scores"]


def frozen_table(parts: list[dict[str, Any]]) -> str:
    head = [
        "held",
        "log-probs: mean difference",
        "largest",
        "scores: mean difference",
        "largest",
        "(std)",
        "bytes, of fp32",
    ]
    rows = []
    for part in parts:
        logprobs, scores = part["logprobs"], part["scores"]
        differences = [f"{of[name]:.1e}" for of in (logprobs, scores) for name in ("mean", "largest")]
        rows.append([part["holding"], *differences, f"{scores['spread']:.1e}", f"{100 * logprobs['bytes']:.0f} %"])
    return markdown(head, rows)


def table(parts: list[dict[str, Any]]) -> str:
    head = [
        "compute", "ratio: std", "largest distance from 1", f"tokens outside ±{CLIP}", "std of answers' ratios",
        f"answers outside ±{CLIP}", "clipped by Quartet, PPO", "by Quartet, RLOO",
    ]  # fmt: skip
    return markdown(
        head,
        [
            [
                part["kind"],
                f"{part['std']:.1e}",
                f"{part['largest']:.1e}",
                f"{100 * part['tokens_outside']:.2f} %",
                f"{part['answers_std']:.1e}",
                f"{100 * part['answers_outside']:.1f} %",
                f"{100 * part['clipped_ppo']:g} %",
                f"{100 * part['clipped_rloo']:g} %",
            ]
            for part in parts
        ],
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = []
    for kind in args.kinds:
        parts.append(measure(kind, args))
        write_results(args, {"precision": parts})
    frozen = [measure_frozen(holding, args) for holding in HOLDINGS]
    write_results(args, {"precision": parts, "frozen": frozen})
    print(table(parts), frozen_table(frozen), sep="\n\n")


if __name__ == "__main__":
    main()
