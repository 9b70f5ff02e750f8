"""Trains a model of 28 M parameters on GSM8K, for measurements that random weights would tell nothing about.

    python benchmarks/trained_model.py --data gsm8k_train.jsonl --out runs/trained [--rows 400 --tokens 614400] [--bf16]

A byte-level BPE of 8192 tokens and a Llama of 8 layers; questions and answers are learned as text, pieces of 512
tokens. Every tenth row is held out. ``--rows`` takes the first of the others alone, learned several times: minutes of
training instead of half an hour. The mean entropy of the model's next token and its cross-entropy are printed and
written to ``entropy.json`` beside the model: in questions and in answers, of rows that were learned and that were not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, PIECE, PIECES_A_STEP, LR = 8192, 512, 2, 1e-3
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
EOS = "<eos>"


@dataclass(frozen=True)
class Row:
    question: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.question}\n{self.answer}{EOS}"


def rows_of(path: Path, *, held_out: bool) -> list[Row]:
    """Those that are learned, or every tenth, which is not."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(line)) for i, line in enumerate(lines) if (i % 10 == 0) == held_out]


def trained_tokenizer(rows: Sequence[Row]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet)
    backend.train_from_iterator((row.text for row in rows), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=EOS)


def pieces(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> Tensor:
    """``[N, 512]``: all rows behind one another; what is left at the end is not used."""
    ids = [token for row in rows for token in tokenizer(row.text)["input_ids"]]
    return torch.tensor(ids[: len(ids) // PIECE * PIECE]).view(-1, PIECE)


def train(model: LlamaForCausalLM, data: Tensor, num_tokens: int, seed: int, bf16: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_steps = num_tokens // (PIECE * PIECES_A_STEP)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optim = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    order, began = torch.empty(0, dtype=torch.int64), time.perf_counter()
    for step in range(num_steps):
        if len(order) < PIECES_A_STEP:
            order = torch.cat([order, torch.randperm(len(data), generator=generator)])
        batch, order = data[order[:PIECES_A_STEP]], order[PIECES_A_STEP:]
        # Linear to the highest rate within 100 steps, then half a cosine to a twentieth of it.
        share = min(1.0, (step + 1) / 100) * (0.525 + 0.475 * math.cos(math.pi * step / num_steps))
        for group in optim.param_groups:
            group["lr"] = LR * share
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == num_steps - 1:
            sys.stdout.write(f"step {step} of {num_steps}: loss {loss:.3f}, {time.perf_counter() - began:.0f} s\n")
            sys.stdout.flush()


@torch.no_grad()
def entropies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]
) -> dict[str, dict[str, float]]:
    """Mean entropy of the next token and its cross-entropy in nats, of questions and of answers."""
    sums = {part: torch.zeros(3, dtype=torch.float64) for part in ("question", "answer")}
    for row in rows:
        ids = torch.tensor(tokenizer(row.text)["input_ids"])[:PIECE]
        first_of_answer = len(tokenizer(row.question + "\n")["input_ids"])
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        surprise = -logprobs.gather(1, ids[1:, None]).squeeze(1)
        for part, places in (("question", slice(0, first_of_answer - 1)), ("answer", slice(first_of_answer - 1, None))):
            found = entropy[places].sum(), surprise[places].sum(), float(len(entropy[places]))
            sums[part] += torch.tensor(found, dtype=torch.float64)
    names = "entropy", "cross_entropy"
    return {part: dict(zip(names, (found[:2] / found[2]).tolist(), strict=True)) for part, found in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows of question and answer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="learned, of those that are not held out; all without it")
    parser.add_argument("--tokens", type=int, default=1_600_000)
    parser.add_argument("--bf16", action="store_true", help="forward passes under autocast: quicker where it is native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch.set_flush_denormal(True)  # vanishing probabilities would cost more than all others
    learned = rows_of(arguments.data, held_out=False)[: arguments.rows]
    trained_tokenizer(learned).save_pretrained(arguments.out)
    tokenizer = AutoTokenizer.from_pretrained(arguments.out)
    eos = tokenizer.eos_token_id
    config = LlamaConfig(vocab_size=VOCAB, bos_token_id=None, eos_token_id=eos, pad_token_id=eos, **CONFIG)
    model = LlamaForCausalLM(config)
    data = pieces(tokenizer, learned)
    num_parameters = sum(p.numel() for p in model.parameters())
    sys.stdout.write(f"{num_parameters / 1e6:.1f} M parameters, {data.numel()} tokens of text\n")
    train(model, data, arguments.tokens, arguments.seed, arguments.bf16)
    model.eval().save_pretrained(arguments.out)
    measured = {"learned": learned[:200], "held_out": rows_of(arguments.data, held_out=True)[:200]}
    found = {name: entropies(model, tokenizer, rows) for name, rows in measured.items()}
    (arguments.out / "entropy.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
