"""Plain generation with the native engine: for `quartet generate`, evaluation and sampling preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from quartet.models.packed import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from quartet.rollout.seeds import sample_seed
from quartet.schedule.request_store import completion_text
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec


@dataclass(frozen=True)
class Generated:
    """One completion: its text (without end-of-text or stop string), why it ended, and the raw completion."""

    text: str
    finish_reason: str
    completion: Completion


def generate(
    packed: PackedCausalLM,
    codec: TextCodec,
    prompts: Sequence[PromptText],
    sampling: SamplingParams,
    *,
    num_responses: int = 1,
    seed: int = 0,
    max_running: int = 64,
    on_done: Callable[[int], None] | None = None,
) -> list[list[Generated]]:
    """Completions of every prompt, ``num_responses`` each, in order.

    Args:
        sampling: applies to all; every response gets its own seed, derived from ``seed``, prompt place and place.
        on_done: called with the number of completions finished by each engine step.
    """
    engine = NativeEngine(packed, max_running=max_running, decode=codec.decode)
    stops = tuple(sorted({*sampling.stop_token_ids, *codec.eos_ids}))
    encoded = [tuple(codec.encode_prompt(prompt)) for prompt in prompts]
    requests = [
        Request(f"{p}.{r}", str(p), ids, replace(sampling, stop_token_ids=stops, seed=sample_seed(seed, 0, p, r)))
        for p, ids in enumerate(encoded)
        for r in range(num_responses)
    ]

    def report(completions: Sequence[Completion]) -> None:
        if on_done is not None:
            on_done(len(completions))

    found = iter(run_to_end(engine, requests, report))
    return [
        [Generated(completion_text(codec, ids, c), c.finish_reason.value, c) for c in islice(found, num_responses)]
        for ids in encoded
    ]


def run_to_end(
    engine: RolloutEngine,
    requests: Sequence[Request],
    on_done: Callable[[Sequence[Completion]], None] | None = None,
) -> list[Completion]:
    """Completions of the requests, in their order, by an engine that does nothing else meanwhile.

    Args:
        on_done: called with the completions of each engine step that finished any.
    """
    engine.submit(requests)
    found: dict[str, Completion] = {}
    while engine.has_work:
        finished = engine.step()
        found.update({completion.request_id: completion for completion in finished})
        if finished and on_done is not None:
            on_done(finished)
    return [found[request.request_id] for request in requests]
