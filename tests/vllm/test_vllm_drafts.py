"""Drafts in vLLM: n-grams and Medusa heads change no token, what is kept is what the heads of these weights give."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.protocol import Completion, EngineStats, Request

TOLERANCE = 1e-4
DEPTH = 3
HISTORY = {"type": "history", "min_match": 1, "max_draft": 4}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"temperature": 0.3}, {"temperature": 0.1, "top_p": 0.9}, {"draw": "gumbel"},
    {"temperature": 0.2, "draw": "gumbel", "top_k": 20}, {"temperature": 0.1, "max_new_tokens": 500},
]  # fmt: skip


def asked(sides: Any) -> list[Request]:
    """Mixed requests: also one that fills the context, ones that a token or a text ends, and one for a single token."""
    long = dict(max_new_tokens=100)
    requests = [request for each in OPTIONS for request in sides.requests(4, **{**long, **each})]
    (plain,) = sides.generate(sides.requests(1, temperature=0.0, **long))
    ends = plain.token_ids[9]
    requests += sides.requests(2, temperature=0.0, stop_token_ids=(ends,), **long)
    requests += sides.requests(2, temperature=0.0, stop_strings=(f"w{ends}",), **long)
    return requests + sides.requests(2, max_new_tokens=1)


def compare(drafting: Any, plain: Any) -> None:
    """All but a draw that falls within rounding of the boundary between two tokens."""
    requests = asked(drafting)
    with_drafts, without = drafting.generate(requests), plain.generate(requests)
    assert drafting.error(with_drafts, requests) < TOLERANCE
    ends = [(c.token_ids, c.finish_reason, c.text_end) for c in with_drafts]
    assert sum(a != (c.token_ids, c.finish_reason, c.text_end) for a, c in zip(ends, without, strict=True)) <= 1


def heads_of(model: Any, *, shared: bool, layers: int) -> MedusaHeads:
    """Of random blocks: what they guess is worthless, unless they are fitted."""
    heads = MedusaHeads(PackedCausalLM(copy.deepcopy(model)), DEPTH, layers=layers, shared_head=shared)
    for parameter in heads.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return heads.requires_grad_(False)


@torch.no_grad()
def guesses(sides: Any, request: Request, completion: Completion) -> Tensor:
    """``[T, K]``: what the heads guess behind the state that gave each of the answer's tokens."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    hidden = sides.model(ids, output_hidden_states=True).hidden_states[-1][0, len(request.prompt_ids) - 1 : -1]
    named, found = dict(sides.heads.named_parameters()), []
    for k in range(DEPTH):
        state = hidden
        for n in range(sides.heads.layers):
            state = state + torch.nn.functional.silu(state @ named[f"blocks.{k}.layers.{n}.weight"].T)
        head = named.get(f"lm_heads.{k}.weight", sides.model.lm_head.weight)
        found.append((state @ head.T).argmax(-1))
    return torch.stack(found, 1)


def expected(sides: Any, requests: Sequence[Request], completions: Sequence[Completion]) -> list[tuple[int, int]]:
    """Drafted and kept tokens by depth, as decoding goes."""
    counts = [[0, 0] for _ in range(DEPTH)]
    for request, completion in zip(requests, completions, strict=True):
        tokens, newest = completion.token_ids, 0
        drafts = guesses(sides, request, completion).tolist()
        while newest + 1 < len(tokens):
            kept = 0
            for guess, token in zip(drafts[newest], tokens[newest + 1 :], strict=False):
                counts[kept][0] += 1
                if guess != token:
                    break
                counts[kept][1] += 1
                kept += 1
            newest += kept + 1
    return [(drafted, kept) for drafted, kept in counts]


def counted(before: EngineStats, after: EngineStats) -> list[tuple[int, int]]:
    drafted = [b - a for a, b in zip(before.drafted_by_depth, after.drafted_by_depth, strict=True)]
    kept = [b - a for a, b in zip(before.kept_by_depth, after.kept_by_depth, strict=True)]
    return list(zip(drafted, kept, strict=True))


@torch.no_grad()
def fit(sides: Any, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Heads with LM heads of their own learn one answer by heart: there are fewer of its states than their width."""
    (request,), (completion,) = requests, completions
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    hidden = sides.model(ids, output_hidden_states=True).hidden_states[-1][0, len(request.prompt_ids) - 1 : -1]
    for name, parameter in sides.heads.named_parameters():
        if name.startswith("blocks"):
            parameter.zero_()
            continue
        ahead = 1 + int(name.split(".")[1])
        wanted = torch.nn.functional.one_hot(torch.tensor(completion.token_ids[ahead:]), parameter.shape[0]).float()
        parameter.copy_((torch.linalg.pinv(hidden[:-ahead].double()) @ wanted.double()).T)


@pytest.fixture(scope="module")
def plain(start: Callable[..., Any]) -> Any:
    return start(1, tied=False)


@pytest.fixture
def stopped() -> Iterator[list[Any]]:
    sides: list[Any] = []
    yield sides
    for each in sides:
        each.router.close()


def test_drafts_from_history_change_nothing(start: Callable[..., Any], plain: Any, stopped: list[Any]) -> None:
    drafting = start(1, tied=False, speculation=HISTORY)
    stopped.append(drafting)
    compare(drafting, plain)
    stats = drafting.router.stats()
    assert len(stats.kept_by_depth) == 4 and stats.kept_by_depth[1] > 0
    assert stats.num_row_steps + sum(stats.kept_by_depth) == stats.generated_tokens


def test_drafts_in_the_real_stories(start: Callable[..., Any], stories: Path, stopped: list[Any]) -> None:
    """Its heads of attention are padded; its texts repeat themselves, so drafts are kept."""
    drafting = start(1, path=stories, speculation={"type": "history", "min_match": 2, "max_draft": 4})
    stopped.append(drafting)
    requests = drafting.requests(6, (1, *range(300, 330)), max_new_tokens=150, temperature=0.0)[:1]
    requests += drafting.requests(6, (1, *range(300, 330)), max_new_tokens=150, temperature=0.5)
    completions = drafting.generate(requests)
    assert drafting.error(completions, requests) < TOLERANCE
    stats = drafting.router.stats()
    assert stats.kept_by_depth[0] > 10
    assert stats.num_row_steps + sum(stats.kept_by_depth) == stats.generated_tokens


@pytest.mark.parametrize(("shared", "layers"), [(True, 2), (False, 1)], ids=["shared head", "own heads"])
def test_heads_that_learn_are_those_of_the_weights(
    shared: bool, layers: int, start: Callable[..., Any], plain: Any, stopped: list[Any]
) -> None:
    """What is kept after an update is what the new heads and the new trunk's LM head give, and not the old ones."""
    drafting = start(1, tied=False, heads=lambda model: heads_of(model, shared=shared, layers=layers))
    stopped.append(drafting)
    compare(drafting, plain)
    for _ in range(2):
        before = drafting.router.stats()
        requests = [request for each in OPTIONS for request in drafting.requests(4, **{**each, "max_new_tokens": 60})]
        completions = drafting.generate(requests)
        assert drafting.error(completions, requests) < TOLERANCE
        found, old = counted(before, drafting.router.stats()), expected(drafting, requests, completions)
        assert found == old and found[0][1] > 0
        drafting.change(0.05)
        assert expected(drafting, requests, completions) != old, "the change moves what heads guess"


def test_heads_that_know_the_answer_are_kept_until_they_are_stale(
    start: Callable[..., Any], stopped: list[Any]
) -> None:
    drafting = start(1, tied=False, heads=lambda model: heads_of(model, shared=False, layers=1))
    stopped.append(drafting)

    def share() -> float:
        before = drafting.router.stats()
        answer.append(drafting.generate(drafting.requests(1, temperature=0.0, max_new_tokens=50))[0])
        counts = counted(before, drafting.router.stats())
        return sum(kept for _, kept in counts) / sum(drafted for drafted, _ in counts)

    answer: list[Completion] = []
    for _ in range(2):
        stale = share()
        fit(drafting, drafting.requests(1), answer[-1:])
        drafting.send()
        learned = share()
        assert learned > 0.95 > 0.3 > stale, (learned, stale)
        assert answer[-1].token_ids == answer[-2].token_ids
        drafting.change(0.05)


def test_running_answers_go_on_with_new_heads(start: Callable[..., Any], stopped: list[Any]) -> None:
    drafting = start(1, heads=lambda model: heads_of(model, shared=True, layers=1))
    stopped.append(drafting)
    requests = drafting.requests(6, max_new_tokens=400, temperature=0.3)
    drafting.router.submit(requests)
    while not any(len(g.token_ids) > 2 for g in drafting.router.generated([r.request_id for r in requests]).values()):
        time.sleep(0.01)
    before = drafting.version
    drafting.change()
    found: dict[str, Completion] = {}
    while len(found) < len(requests):
        found |= {completion.request_id: completion for completion in drafting.router.completed(1.0)}
    for completion in found.values():
        assert len(completion.token_ids) == 400
        assert set(completion.versions) == {before, drafting.version}
        begun = completion.versions.index(drafting.version)
        ids = torch.tensor([[*requests[0].prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            scores = drafting.model(ids).logits[0, len(requests[0].prompt_ids) - 1 : -1] / 0.3
        own = torch.log_softmax(scores, -1).gather(1, torch.tensor(completion.token_ids)[:, None])[begun:, 0]
        torch.testing.assert_close(own, torch.tensor(completion.logprobs)[begun:], atol=TOLERANCE, rtol=0)


def test_heads_that_stay_beside_adapters(
    start: Callable[..., Any], save_model: Any, stopped: list[Any], tmp_path: Path
) -> None:
    """They read the adapted model's states; sleep does not forget what nobody sends again."""
    path = save_model(tmp_path / "model", tied=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    heads_of(model, shared=True, layers=1).save(tmp_path / "heads")
    base = {name: module.weight.detach() for name, module in model.named_modules() if name.endswith("q_proj")}
    factors = {
        f"{name}.lora_{factor}.default.weight": torch.zeros(shape)
        for name, weight in base.items()
        for factor, shape in (("A", (4, weight.shape[1])), ("B", (weight.shape[0], 4)))
    }
    speculation = {"type": "medusa", "path": str(tmp_path / "heads"), "depth": DEPTH, "train": None}
    sides = start(path=path, sent=factors, lora={"rank": 4, "alpha": 8.0}, speculation=speculation)
    stopped.append(sides)
    sides.heads = MedusaHeads.load(tmp_path / "heads", PackedCausalLM(model))

    def add_products() -> None:
        for name, weight in base.items():
            a, b = (factors[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
            sides.model.get_submodule(name).weight.copy_(weight + 2.0 * b @ a)

    sides.changed = add_products
    for _ in range(2):
        sides.change(0.1)
        before = sides.router.stats()
        requests = sides.requests(8, temperature=0.1, max_new_tokens=60)
        completions = sides.generate(requests)
        assert sides.error(completions, requests) < TOLERANCE
        assert counted(before, sides.router.stats()) == expected(sides, requests, completions)
        sides.router.pause()
        sides.router.sleep(2)
        sides.router.wake()
        sides.router.resume()
