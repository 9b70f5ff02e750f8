"""SFT → reward model → GRPO from Python, over Hugging Face objects and plain callables.

A tiny random Qwen2 learns to write two digits the other way round, from demonstrations of which a third are wrong, then
from pairs that prefer the right answer. Seconds on a CPU: ``python examples/python_api.py``; a number behind it is
another seed.
"""

import random
import sys

from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

import quartet as q
from quartet.extras.quickstart.tokenizer import build_tokenizer


def reversed_digits(prompts: list[str], completions: list[str]) -> list[float]:
    """Any callable is a reward: the share of digits that are right."""
    return [
        sum(a == b for a, b in zip(c, p[1::-1], strict=False)) / 2 for p, c in zip(prompts, completions, strict=True)
    ]


seed = int(sys.argv[1]) if sys.argv[1:] else 0
set_seed(seed)  # the model's first weights, and the demonstrations
questions = [f"{n:02d}=" for n in range(100)]
demonstrations = [{"prompt": p, "completion": p[1::-1] if random.random() < 0.66 else p[:2]} for p in questions * 4]
pairs = [{"prompt": p, "chosen": p[1::-1], "rejected": p[:2]} for p in questions if p[0] != p[1]]

tokenizer = build_tokenizer()
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **shape, **special))
train = q.TrainConfig(optim=q.OptimConfig(lr=3e-3, warmup_steps=5))

recipe = q.SFTRecipe(train=train, steps=150, seed=seed)
sft = q.SFTTrainer(recipe, model=model, tokenizer=tokenizer, rows=demonstrations).train()
recipe = q.RewardModelRecipe(train=train, epochs=10, seed=seed)
reward_model = q.RewardModelTrainer(recipe, model=sft.model, tokenizer=tokenizer, rows=pairs).train()
actor, rollout = {"train": {"optim": {"lr": 5e-4}}}, {"sampling": {"max_new_tokens": 4}}
recipe = q.RLRecipe(algorithm=q.GRPO(), actor=actor, rollout=rollout, steps=15, minibatches=2, seed=seed)
rewards = [reward_model.model, reversed_digits]
rl = q.RLTrainer(recipe, model=sft.model, tokenizer=tokenizer, rewards=rewards, prompts=questions).train()
print(f"{rl.path / 'model'} holds the policy; try: quartet report {rl.path}")
