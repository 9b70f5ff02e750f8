"""What every rollout engine must do, wherever it computes.

A kind joins by a module with a fixture ``kind`` (of module scope: tests leave the engine without work, and raise the
version by their updates) and a subclass of ``EngineContract``::

    contract: Any = importlib.import_module("engine_contract")

    @pytest.fixture(scope="module")
    def kind() -> Iterator[contract.Kind]: ...

    class TestMine(contract.EngineContract):
        pass
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.rollout.protocol import Completion, FinishReason, Request, RolloutEngine, SamplingParams
from quartet.weights.sink import write_weights

LIMIT_S = 60.0
"""For what a test waits for."""


@dataclass
class Kind:
    """An engine, and what to expect of it.

    Attributes:
        models: what it computes with now, and other weights of the same shapes.
        decode: its tokens after those of a prompt → text, as for stop strings.
        context: tokens of a prompt and its answer together.
        takes_weights: it has a weight sink; else updates are not tested.
        sleeps: ``sleep`` and ``wake`` are there.
        drains: a pause lets what runs complete.
        is_seeded: a request's tokens follow from its seed, whatever else runs.
        recomputes: tokens of running requests after an update are the new weights' to rounding: nothing computed from
            the old ones is used.
        tolerance: absolute, of log-probabilities against the model's own.
        version: of what it computes with now.
    """

    engine: RolloutEngine
    models: tuple[PreTrainedModel, PreTrainedModel]
    decode: Callable[[Sequence[int], Sequence[int]], str]
    vocab_size: int
    context: int
    takes_weights: bool = True
    sleeps: bool = True
    drains: bool = False
    is_seeded: bool = True
    recomputes: bool = True
    tolerance: float = 1e-4
    version: int = 0
    _names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def model(self) -> PreTrainedModel:
        return self.models[0]

    def ask(self, prompt: Sequence[int] = (5, 9, 2), group: str | None = None, **sampling: object) -> Request:
        name = f"r{next(self._names)}"
        return Request(name, group or name, tuple(prompt), SamplingParams(**sampling))

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Their completions, in their order."""
        self.engine.submit(requests)
        return self.finish(requests)

    def finish(self, requests: Sequence[Request]) -> list[Completion]:
        done: dict[str, Completion] = {}
        end = time.monotonic() + LIMIT_S
        while len(done) < len(requests):
            assert time.monotonic() < end, f"only {sorted(done)} ended in {LIMIT_S} s"
            for completion in self.engine.completed(0.2):
                assert completion.request_id not in done, "answered twice"
                done[completion.request_id] = completion
        assert self.engine.completed(0) == []
        return [done[request.request_id] for request in requests]

    def pause_within(self, requests: Sequence[Request], num_tokens: int) -> None:
        """Submits, and pauses once they have at least so many tokens together, and are not through."""
        if self.drains:
            pytest.skip("a pause lets what runs complete")
        before = self.engine.stats().generated_tokens
        self.engine.submit(requests)
        self.engine.pause()
        end = time.monotonic() + LIMIT_S
        while self.engine.stats().generated_tokens - before < num_tokens:
            assert time.monotonic() < end, "no tokens"
            self.engine.resume()
            assert self.engine.completed(0) == [], "they ended before the pause"
            self.engine.pause()

    def set_weights(self, model: PreTrainedModel) -> None:
        """In a pause, as the protocol has it."""
        self.version += 1
        self.engine.pause()
        write_weights(self.engine.weight_sink(), model.named_parameters(), self.version)
        self.engine.resume()

    def swap(self) -> None:
        """Gives the engine the other weights; ``models`` follows."""
        self.models = self.models[::-1]
        self.set_weights(self.model)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    tokens = torch.tensor(completion.token_ids)
    logits = model(torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0]
    scaled = logits[len(request.prompt_ids) - 1 : -1].float() / (request.sampling.temperature or 1.0)
    return scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def check_logprobs(kind: Kind, found: Sequence[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, atol=kind.tolerance, rtol=0)


class EngineContract:
    """Each test submits, waits, and leaves nothing behind."""

    def test_columns_of_a_completion_are_equally_long(self, kind: Kind) -> None:
        asked = [kind.ask(seed=i, max_new_tokens=1 + i) for i in range(12)]
        for length, (request, made) in enumerate(zip(asked, kind.run(asked), strict=True), 1):
            assert len(made.token_ids) == len(made.logprobs) == len(made.versions) == length
            assert (made.finish_reason, made.group) == (FinishReason.LENGTH, request.group)
            assert set(made.versions) == {kind.version}

    @pytest.mark.parametrize(
        "options",
        [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 4, "top_p": 0.9}, {"temperature": 0.0}],
        ids=["plain", "temperature", "truncated", "greedy"],
    )
    def test_logprobs_are_of_the_scaled_untruncated_distribution(self, kind: Kind, options: dict[str, float]) -> None:
        request = kind.ask(seed=3, max_new_tokens=20, **options)
        (made,) = kind.run([request])
        check_logprobs(kind, made.logprobs, logprobs_of(kind.model, request, made))

    def test_greedy_is_argmax(self, kind: Kind) -> None:
        request = kind.ask(temperature=0.0, max_new_tokens=15)
        tokens = kind.run([request])[0].token_ids
        with torch.no_grad():
            logits = kind.model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0]
        assert logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == list(tokens)

    def test_seeds_decide_and_other_requests_do_not(self, kind: Kind) -> None:
        if not kind.is_seeded:
            pytest.skip("its tokens do not follow from seeds alone")
        asked = [kind.ask(group="g", seed=i % 10, max_new_tokens=12) for i in range(20)]
        together = [made.token_ids for made in kind.run(asked)]
        assert together[:10] == together[10:]
        assert len(set(together)) == 10
        assert kind.run([kind.ask(seed=7, max_new_tokens=12)])[0].token_ids == together[7]

    def test_stop_token_is_kept(self, kind: Kind) -> None:
        free = kind.run([kind.ask(temperature=0.0, max_new_tokens=30)])[0].token_ids
        first = free.index(free[9])
        (made,) = kind.run([kind.ask(temperature=0.0, max_new_tokens=30, stop_token_ids=(free[9],))])
        assert (made.token_ids, made.finish_reason) == (free[: first + 1], FinishReason.STOP)

    def test_stop_string_is_located(self, kind: Kind) -> None:
        free = kind.run([kind.ask(temperature=0.0, max_new_tokens=30)])[0].token_ids
        wanted = kind.decode((), free[9:12])
        asked = kind.ask(temperature=0.0, max_new_tokens=30, stop_strings=(wanted,))
        (made,) = kind.run([asked])
        text = kind.decode(asked.prompt_ids, made.token_ids)
        assert (made.text_end, made.finish_reason) == (text.index(wanted), FinishReason.STOP_STRING)
        assert made.token_ids == free[: len(made.token_ids)]
        assert wanted not in kind.decode(asked.prompt_ids, made.token_ids[:-1])

    def test_cancelled_requests_come_back_once_and_their_ids_are_free(self, kind: Kind) -> None:
        long, short = kind.ask(max_new_tokens=70), kind.ask(max_new_tokens=40)
        kind.pause_within([long, short], 4)
        kind.engine.cancel([long.request_id, "never heard of"])
        again = replace(long, sampling=SamplingParams(max_new_tokens=3))
        kind.engine.submit([again])
        kind.engine.resume()
        done: list[Completion] = []
        end = time.monotonic() + LIMIT_S
        while len(done) < 3 and time.monotonic() < end:
            done += kind.engine.completed(0.2)
        assert kind.engine.completed(0) == []
        cancelled, *others = sorted(done, key=lambda made: made.finish_reason)
        assert (cancelled.request_id, cancelled.finish_reason) == (long.request_id, FinishReason.CANCELLED)
        assert len(cancelled.token_ids) < 70
        lengths = {made.request_id: len(made.token_ids) for made in others}
        assert lengths == {short.request_id: 40, long.request_id: 3}

    def test_nothing_is_made_in_a_pause(self, kind: Kind) -> None:
        asked = [kind.ask(seed=i, max_new_tokens=40) for i in range(2)]
        expected = kind.run(asked)
        again = [kind.ask(seed=i, max_new_tokens=40) for i in range(2)]
        kind.pause_within(again, 4)
        before = kind.engine.stats().generated_tokens
        assert kind.engine.completed(0.2) == []
        assert kind.engine.stats().generated_tokens == before
        kind.engine.resume()
        if kind.is_seeded:
            assert [made.token_ids for made in kind.finish(again)] == [made.token_ids for made in expected]
        else:
            kind.finish(again)

    def test_tokens_follow_the_weights_and_name_their_version(self, kind: Kind) -> None:
        if not kind.takes_weights:
            with pytest.raises(UserError):
                kind.engine.weight_sink()
            return
        request, before = kind.ask(seed=2, max_new_tokens=60), kind.version
        kind.pause_within([request], 3)
        old = kind.model
        kind.swap()
        (made,) = kind.finish([request])
        num_old = made.versions.count(before)
        assert 3 <= num_old < 60
        assert made.versions == (before,) * num_old + (kind.version,) * (60 - num_old)
        assert kind.engine.stats().policy_version == kind.version
        check_logprobs(kind, made.logprobs[:num_old], logprobs_of(old, request, made)[:num_old])
        if kind.recomputes:
            check_logprobs(kind, made.logprobs[num_old:], logprobs_of(kind.model, request, made)[num_old:])

    def test_a_refused_update_changes_nothing(self, kind: Kind) -> None:
        if not kind.takes_weights:
            pytest.skip("it takes none")
        request = kind.ask(temperature=0.0, max_new_tokens=10)
        expected = kind.run([request])[0]
        few = list(kind.models[1].named_parameters())[1:]
        with pytest.raises(UserError):
            write_weights(kind.engine.weight_sink(), few, kind.version + 1)
        again = kind.run([kind.ask(temperature=0.0, max_new_tokens=10)])[0]
        assert (again.token_ids, again.versions) == (expected.token_ids, expected.versions)

    @pytest.mark.parametrize("level", [1, 2])
    def test_it_computes_as_before_after_sleep(self, kind: Kind, level: int) -> None:
        if not kind.sleeps:
            pytest.skip("it does not sleep")
        asked = [kind.ask(temperature=0.0, max_new_tokens=40) for _ in range(2)]
        expected = kind.run([asked[0]])[0].token_ids
        kind.pause_within([asked[1]], 2)
        kind.engine.sleep(level)
        kind.engine.wake()
        if level == 2:
            kind.set_weights(kind.model)
        kind.engine.resume()
        assert kind.finish([asked[1]])[0].token_ids == expected

    def test_stats_count_what_happened(self, kind: Kind) -> None:
        before = kind.engine.stats().generated_tokens
        kind.run([kind.ask(seed=i, max_new_tokens=5) for i in range(6)])
        stats = kind.engine.stats()
        assert stats.generated_tokens - before == 30
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.policy_version == kind.version

    @pytest.mark.parametrize("bad", ["too long", "no such token", "negative token", "id in use", "id twice"])
    def test_bad_requests_raise_and_change_nothing(self, kind: Kind, bad: str) -> None:
        held, fine = kind.ask(max_new_tokens=60), kind.ask()
        request = {
            "too long": kind.ask([1] * kind.context),
            "no such token": kind.ask([kind.vocab_size]),
            "negative token": kind.ask([-1]),
            "id in use": replace(fine, request_id=held.request_id),
            "id twice": fine,
        }[bad]
        kind.engine.pause()
        kind.engine.submit([held])
        with pytest.raises(UserError):
            kind.engine.submit([fine, request])
        kind.engine.resume()
        assert len(kind.finish([held])[0].token_ids) == 60
