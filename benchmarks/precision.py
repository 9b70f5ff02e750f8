"""How far sampler and trainer differ in fp32, fp16 and bf16, and what a clip would make of it.

    python benchmarks/precision.py [--model small] [--responses 64] [--length 128] [--threads 2]

A random model with logits as spread as a language model's generates with the native engine and is then asked for the
log-probabilities of the very same tokens by the trainer's forward pass: one policy, two programs, so every ratio should
be 1. Shown are the ratio's deviation and largest distance from 1, the tokens outside PPO's clip (0.2) and the answers
whose product of ratios is outside RLOO's; then the clipped fraction that training really had on its first
mini-batch, where ``old`` is the trainer's own forward.
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
from quartet.models.packed import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams
from quartet.train.engine import Needs, TrainEngine
from quartet.train.objectives import PolicyObjective
from quartet.trainers.generate import run_to_end

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
    done = run_to_end(NativeEngine(packed, max_running=64), requests)
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
    logprobs = engine.forward(batch, Needs(logprobs=True, mask="action_mask")).token["logprobs"].float()
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
    print(table(parts))


if __name__ == "__main__":
    main()
