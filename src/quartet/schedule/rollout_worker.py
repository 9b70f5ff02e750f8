"""The worker of the rollout role: drives an engine in its process and keeps the tokens that it makes.

It is asked in text, and what it says of ended requests is plain data, so that a worker can be anywhere.

What rollout workers are asked for, in text, and the tokens that they keep of what came of it.

Token ids stay in a rollout worker's process until their group is complete: prompts are tokenised here, completions
decoded, and the transcripts of episodes kept.

The worker of a rollout role whose engines generate at their own pace, in processes or on servers of their own.

A call of ``run_steps`` submits, and waits until a group has ended or a slice of time is over. Where the engines share
devices with other roles they are paused between such calls; elsewhere they go on. New weights come in a pause.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import STEP_PREFIX, Trajectory, TrajectorySequence
from quartet.config import UserError
from quartet.config.common import OffloadConfig
from quartet.config.recipe import SamplingConfig
from quartet.data.datasets import PromptItem
from quartet.envs.episode import FinishedEpisode
from quartet.envs.transcript import SOURCE, Action, EpisodeLimits, ObservedState, Transcript
from quartet.observe.memory import held_bytes
from quartet.rollout.drafter import Drafter
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    PacedEngine,
    Request,
    SamplingParams,
    StepEngine,
)
from quartet.rollout.router import Router
from quartet.rollout.sampler import sample_seed
from quartet.schedule.groups import group_batch, single_turn_trajectory
from quartet.schedule.leases import LeaseMode
from quartet.schedule.model_worker import Checkpointed, Offloadable, local_model_bytes
from quartet.schedule.weight_sync import CanarySpec, WeightReceiverMixin
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.train.offload import MoveResult, Offload, OffloadStore
from quartet.train.state import REST, Shape


def sampling_params(config: SamplingConfig, codec: TextCodec) -> SamplingParams:
    """Returns what the recipe says about every sample; end-of-text ends each, and each gets a seed of its own."""
    return SamplingParams(**config.model_dump(), stop_token_ids=tuple(sorted(codec.eos_ids)))


@dataclass(frozen=True)
class PromptRequest:
    """Responses to one prompt, which are submitted together: their ids, and how each is sampled. ``group`` names them
    in the engine."""

    group: str
    prompt: PromptText
    samples: Mapping[str, SamplingParams]

    @classmethod
    def of(
        cls, name: str, item: PromptItem, params: SamplingParams, *, seed: int, draw: int, num: int
    ) -> PromptRequest:
        """Makes the request for ``num`` responses to a prompt. A response's random numbers depend on ``seed``,
        ``draw``, the prompt's id and the response's place alone, so two models get the same ones."""
        seeds = [sample_seed(seed, draw, item.prompt_id, r) for r in range(num)]
        return cls(name, item.prompt, {f"{name}.{r}": replace(params, seed=one) for r, one in enumerate(seeds)})

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self.samples)

    @property
    def lengths(self) -> dict[str, int]:
        """Most tokens of each."""
        return {request_id: sampling.max_new_tokens for request_id, sampling in self.samples.items()}


@dataclass(frozen=True)
class TurnRequest:
    """The next action of an episode, after what its policy has ``seen``."""

    request_id: str
    episode: str
    seen: ObservedState
    sampling: SamplingParams
    limits: EpisodeLimits

    @property
    def request_ids(self) -> tuple[str, ...]:
        return (self.request_id,)

    @property
    def lengths(self) -> dict[str, int]:
        return {self.request_id: self.sampling.max_new_tokens}


AnyRequest = PromptRequest | TurnRequest


@dataclass(frozen=True)
class FinishedRequest:
    """What the driver is told of a request that has ended.

    Args:
        text: of an episode's action; of other requests None, as their text comes with their group.
        held: of an action that the state leaves no room for, the tokens that the state has; else None.
    """

    request_id: str
    text: str | None = None
    held: int | None = None


def completion_text(codec: TextCodec, prompt_ids: Sequence[int], completion: Completion | TrajectorySequence) -> str:
    """Returns what the completion adds to its prompt, up to a stop string and without end-of-text."""
    text = codec.decode_completion(prompt_ids, completion.token_ids)
    return text if completion.text_end is None else text[: completion.text_end]


class RequestStore:
    """Prompts, completions and transcripts of one rollout worker, until their groups are made."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._prompts: dict[str, tuple[int, ...]] = {}  # by request
        self._completions: dict[str, Completion] = {}
        self._episodes: dict[str, str] = {}  # by request
        self._transcripts: dict[str, Transcript] = {}

    def engine_requests(self, asked: AnyRequest) -> list[Request] | FinishedRequest:
        """Returns what the engine is to do; at once an end where the state leaves no room for an action.

        Raises:
            StateError: a state that cannot be tokenised.
            UserError: a prompt that cannot.
        """
        if isinstance(asked, TurnRequest):
            return self._turn(asked)
        ids = tuple(self._codec.encode_prompt(asked.prompt))
        self._prompts.update(dict.fromkeys(asked.samples, ids))
        return [Request(request_id, asked.group, ids, sampling) for request_id, sampling in asked.samples.items()]

    def _turn(self, asked: TurnRequest) -> list[Request] | FinishedRequest:
        if asked.seen.begins:  # perhaps once more, after the environment failed
            self._transcripts.pop(asked.episode, None)
        transcript = self._transcripts.setdefault(asked.episode, Transcript(self._codec))
        self._episodes[asked.request_id] = asked.episode  # before what may be refused, which forgets the episode
        transcript.see(asked.seen)
        room, ids = transcript.room(asked.limits), transcript.token_ids
        if room < 1:
            del self._episodes[asked.request_id]
            return FinishedRequest(asked.request_id, held=len(ids))
        sampling = replace(asked.sampling, max_new_tokens=min(asked.sampling.max_new_tokens, room))
        return [Request(asked.request_id, asked.request_id, ids, sampling, session=asked.episode)]

    def ended(self, made: Completion) -> FinishedRequest:
        """Keeps a completion until its group is made; an action joins its transcript."""
        episode = self._episodes.pop(made.request_id, None)
        if episode is None:
            self._completions[made.request_id] = made
            return FinishedRequest(made.request_id)
        columns = made.token_ids, made.logprobs, made.versions
        action = Action(*columns, made.finish_reason.value, made.text_end, made.columns)
        return FinishedRequest(made.request_id, text=self._transcripts[episode].act(action))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that are not waited for any more, and the episodes that they belong to."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
            self._completions.pop(request_id, None)
            if (episode := self._episodes.pop(request_id, None)) is not None:
                self._transcripts.pop(episode, None)

    def responses(self, index: int, request_ids: Sequence[str], greedy: str | None = None) -> RaggedBatch:
        """Makes the group of these completions, which are not kept any longer; ``greedy`` is the baseline's."""
        made = tuple(self._response(request_id) for request_id in request_ids)
        return group_batch(index, made, None if greedy is None else self._response(greedy))

    def _response(self, request_id: str) -> Trajectory:
        ids, made = self._prompts.pop(request_id), self._completions.pop(request_id)
        return single_turn_trajectory(ids, made, completion_text(self._codec, ids, made))

    def episodes(self, index: int, endings: Sequence[FinishedEpisode], version: int) -> RaggedBatch:
        """Makes the group of these episodes, which are not kept any longer; ``version`` is that of the present
        weights."""
        played = []
        for ending in endings:
            transcript = self._transcripts.pop(ending.episode, None)
            if ending.prompt is not None or transcript is None:
                played.append(Trajectory((self._failed(ending, version),), ending.end, {SOURCE: ending.score}))
                continue
            if ending.reward is not None:
                transcript.earn(ending.reward)
            played.append(Trajectory(transcript.sequences(), ending.end, {SOURCE: ending.score}))
        return group_batch(index, played)

    def _failed(self, ending: FinishedEpisode, version: int) -> TrajectorySequence:
        """Makes what stands for an episode that failed, at whatever turn: one token, which nothing is learned from."""
        assert ending.prompt is not None, "only failed episodes have no transcript"
        ids = tuple(self._codec.encode_prompt(ending.prompt))
        columns = {STEP_PREFIX + SOURCE: (0.0,)}
        return TrajectorySequence(ids, ids[-1:], (True,), (0.0,), (version,), ending.end.value, columns=columns)


CANARY = "canary"


@dataclass(frozen=True)
class EngineOutputs:
    """What came of some engine steps.

    Args:
        ended: requests in the order in which they ended; without cancelled ones.
        steps_left: of those asked for; 0 when they were made, or nothing is left to do.
        sampled: tokens.
        stats: as it ended.
        failed: requests that were not taken, or whose logits were not finite, which ends it early, and the error.
    """

    ended: tuple[FinishedRequest, ...]
    sampled: int
    stats: EngineStats
    steps_left: int = 0
    failed: tuple[tuple[tuple[str, ...], UserError], ...] = ()


class RolloutWorker(WeightReceiverMixin):
    """Calls the engine for a driver that may be in another process, and keeps the tokens that it makes."""

    def __init__(self, engine: StepEngine, codec: TextCodec) -> None:
        self.engine = engine
        self._codec = codec
        self._requests = RequestStore(codec)
        self._running: dict[str, Request] = {}  # submitted, not ended, by their ids
        self._stats = engine.stats()  # at the end of the last call

    def begin(self) -> EngineStats:
        """Gives up what a former driver left; returns the counts so far, for a new one."""
        self.engine.cancel(tuple(self._running))
        self._running.clear()
        self._requests = RequestStore(self._codec)
        return self.stats()

    def run_steps(self, submit: Sequence[AnyRequest], cancel: Sequence[str], num_steps: int) -> EngineOutputs:
        """Cancels, submits, then at most ``num_steps`` engine steps, as long as there is work.

        It returns early when the last request of a group has ended, so that the group is scored at once.

        Args:
            submit: what is taken or refused together.
            cancel: requests that are not waited for any more, or have ended and are not made a group of.
        """
        self.engine.cancel(cancel)
        self._drop(cancel)
        ended: list[FinishedRequest] = []
        failed: list[tuple[tuple[str, ...], UserError]] = []
        for asked in submit:
            try:
                requests = self._requests.engine_requests(asked)
                if isinstance(requests, FinishedRequest):  # an action that its episode leaves no room for
                    ended.append(requests)
                else:
                    self._begin(requests)
            except UserError as error:
                self._drop(asked.request_ids)
                failed.append((asked.request_ids, error))
        before, steps_left = self._stats.generated_tokens, num_steps
        while steps_left and self._may_step():
            try:
                made = [one for one in self._ended(self.engine.step()) if one.request_id in self._running]
            except GenerationError as error:
                self._drop(error.request_ids)
                failed.append((error.request_ids, error))
                steps_left = 0
                break
            ended += [self._requests.ended(completion) for completion in made]
            steps_left -= 1
            if self._completes_a_group(made):
                break
        stats = self.stats()
        steps_left = steps_left if self.engine.has_work else 0
        return EngineOutputs(tuple(ended), stats.generated_tokens - before, stats, steps_left, tuple(failed))

    def _may_step(self) -> bool:
        return self.engine.has_work

    def _begin(self, requests: Sequence[Request]) -> None:
        if requests:
            self.engine.submit(requests)
            self._running.update((request.request_id, request) for request in requests)

    def _ended(self, completions: Sequence[Completion]) -> list[Completion]:
        # A request that was cancelled may have been asked for again under its name.
        return [made for made in completions if made.finish_reason is not FinishReason.CANCELLED]

    def _completes_a_group(self, ended: Sequence[Completion]) -> bool:
        groups = {made.group for made in ended if self._running.pop(made.request_id, None) is not None}
        return bool(groups.difference(request.group for request in self._running.values()))

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._requests.forget(request_ids)
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def responses(self, index: int, request_ids: Sequence[str], greedy: str | None = None) -> RaggedBatch:
        """Makes the batch of a group whose requests have all ended: see ``group_batch``; ``greedy`` is the
        baseline's."""
        return self._requests.responses(index, request_ids, greedy)

    def episodes(self, index: int, endings: Sequence[FinishedEpisode]) -> RaggedBatch:
        """Makes the batch of a group of episodes that have ended."""
        return self._requests.episodes(index, endings, self._stats.policy_version)

    def answers(self, requests: Sequence[PromptRequest], indices: Sequence[int]) -> RaggedBatch:
        """Returns the groups of these requests under these indices, one after the other, by an engine that does nothing
        else.

        Raises:
            UserError: the engine refuses a request.
            GenerationError: logits that are not finite.
        """
        submitted: list[Request] = []
        try:
            for asked in requests:
                of_prompt = self._requests.engine_requests(asked)
                assert not isinstance(of_prompt, FinishedRequest), "only an episode's state may leave no room"
                submitted += of_prompt
            self.engine.submit(submitted)
            while self.engine.has_work:
                for completion in self._ended(self.engine.step()):
                    self._requests.ended(completion)
        except UserError:
            for asked in requests:
                self._requests.forget(asked.request_ids)
            raise
        pairs = zip(indices, requests, strict=True)
        return RaggedBatch.concat([self._requests.responses(index, asked.request_ids) for index, asked in pairs])

    def share(self, version: int) -> None:
        """Notes that the trainer's tensors, which this engine computes with, have become those of ``version``."""
        self.engine.update_weights(None, version)

    def run_canary(self, probe: CanarySpec, name: str) -> EngineOutputs:
        """Generates the greedy continuation of the probe, for ``canary``; returns what else ended meanwhile."""
        before = self._stats.generated_tokens
        ids = tuple(self._codec.encode_prompt(probe.prompt))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=probe.num_tokens)
        answers, others = self._answers_of_engines(Request(CANARY, CANARY, ids, sampling))
        names = [name, *(f"{name}.{number}" for number in range(1, len(answers)))]
        batch = RaggedBatch.from_groups([ids], [[answer.token_ids for answer in answers]], names)
        mask, logprobs = batch.sequence_index() >= 0, torch.zeros(batch.num_tokens, dtype=torch.float64)
        logprobs[mask] = torch.tensor([x for answer in answers for x in answer.logprobs], dtype=torch.float64)
        self._canary = batch.with_token(loss_mask=mask, rollout_logprobs=logprobs)
        stats = self.stats()
        return EngineOutputs(tuple(others), stats.generated_tokens - before, stats)

    def _answers_of_engines(self, request: Request) -> tuple[list[Completion], list[FinishedRequest]]:
        """Returns what each engine behind this one answers, and what else ended meanwhile."""
        asked, answers, others = self._ask_engines(request), dict[str, Completion](), list[FinishedRequest]()
        while len(answers) < len(asked):
            for made in self._ended(self.engine.step()):
                if made.request_id in asked:
                    answers[made.request_id] = made
                else:
                    self._running.pop(made.request_id, None)
                    others.append(self._requests.ended(made))
        return [answers[request_id] for request_id in asked], others

    def _ask_engines(self, request: Request) -> Sequence[str]:
        """Submits the request to every engine behind this one; returns the ids of the answers."""
        self.engine.submit([request])
        return [request.request_id]

    def canary(self) -> RaggedBatch:
        """Returns what ``run_canary`` made of its probe: ``loss_mask`` and ``rollout_logprobs`` (fp64) of its
        tokens."""
        return self._canary

    def stats(self) -> EngineStats:
        self._stats = self.engine.stats()
        return self._stats


class NativeRolloutWorker(RolloutWorker, Offloadable, Checkpointed):
    """An engine under a placement: it takes weights of its own, and gives up cache and weights while others work.

    Its share of a checkpoint is what its drafts are made from; an engine that drafts nothing has none.
    """

    def __init__(self, engine: NativeEngine, codec: TextCodec) -> None:
        super().__init__(engine, codec)
        self.engine: NativeEngine = engine

    def sizes(self) -> dict[LeaseMode, int]:
        """Returns the bytes that must be on the device to generate: its own weights; the cache grows with the
        requests."""
        return {"generate": local_model_bytes(self.engine.packed) if self.engine.owns_weights else 0}

    def offload(self) -> MoveResult:
        """Destroys the cache and moves the weights away. Requests are kept: their keys and values are computed
        again."""
        before, device = held_bytes(self.engine.packed.device), self.engine.packed.device
        cached = self.engine.release_cache()
        moved = super().offload()
        return replace(moved, num_bytes=moved.num_bytes + cached, freed_bytes=before - held_bytes(device))

    def _offload(self, store: OffloadStore) -> Offload:
        return Offload(self.engine.packed, store)

    # Checkpoints -----------------------------------------------------------------------------------------

    @property
    def _drafter(self) -> Drafter:
        assert self.engine.drafter is not None, "an engine that drafts"
        return self.engine.drafter

    def mark(self) -> dict[str, Any]:
        """Marks the state of this moment, which is what is saved from now on, and returns it."""
        return self._drafter.mark()

    def rewind(self, marked: Mapping[str, Any]) -> None:
        """Goes back to the state of a ``mark``, from which drafts are made again; it may be of an engine before this
        one."""
        self._drafter.load(marked)

    def checkpoint_state(self) -> dict[str, Any]:
        return self._drafter.state()

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[Mapping[str, Tensor]]:
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved.items()}
        yield tensors
        self._drafter.load({**tensors, REST: rest})


class ServedRolloutWorker(RolloutWorker, Offloadable):
    """
    Args:
        weight_bytes: of the policy in all engines.
        lease_s: longest call of ``run_steps``.
        shares_devices: other roles compute on the engines' devices between two leases.
        sleep_level: how deeply they sleep while the memory is others'.
        close: ends what was made for the engines.
    """

    engine: PacedEngine

    def __init__(
        self,
        router: Router,
        codec: TextCodec,
        *,
        weight_bytes: int,
        lease_s: float = 0.25,
        shares_devices: bool,
        sleep_level: Literal[1, 2],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._router = router
        super().__init__(PacedEngine(router, lease_s), codec)
        self._weight_bytes, self._lease_s = weight_bytes, lease_s
        self._shares_devices, self._sleep_level = shares_devices, sleep_level
        self._close = close
        self._lease_end = 0.0
        self._is_paused = self._is_asleep = False

    def close(self) -> None:
        self._router.close()
        self._close()

    # Generation ------------------------------------------------------------------------------------------

    def begin(self) -> EngineStats:
        stats = super().begin()
        self.engine.step_s = 0.0
        while self.engine.has_work:  # what ended before it was cancelled: its name may be asked for again
            with contextlib.suppress(GenerationError):
                if not self.engine.step():
                    break
        return stats

    def run_steps(self, submit: Sequence[AnyRequest], cancel: Sequence[str], num_steps: int) -> EngineOutputs:
        """Runs steps as any rollout worker does; ``num_steps`` above 0 is one slice of time."""
        if not num_steps:
            return super().run_steps(submit, cancel, 0)
        self._resume()
        self._lease_end = time.monotonic() + self._lease_s
        outputs = super().run_steps(submit, cancel, 1 << 30)
        self._yield_devices()
        return replace(outputs, steps_left=0)

    def _may_step(self) -> bool:
        self.engine.step_s = self._lease_end - time.monotonic()
        return self.engine.step_s > 0 and self.engine.has_work

    def answers(self, requests: Sequence[PromptRequest], indices: Sequence[int]) -> RaggedBatch:
        self._resume()
        found = super().answers(requests, indices)
        self._yield_devices()
        return found

    def _resume(self) -> None:
        self.engine.step_s = self._lease_s
        if self._is_paused:
            self._router.resume()
            self._is_paused = False

    def _pause(self) -> None:
        if not self._is_paused:
            self._router.pause()
            self._is_paused = True

    def _yield_devices(self) -> None:
        if self._shares_devices:
            self._pause()

    # The canary ------------------------------------------------------------------------------------------

    def run_canary(self, probe: CanarySpec, name: str) -> EngineOutputs:
        self._resume()
        outputs = super().run_canary(probe, name)
        self._yield_devices()
        return outputs

    def _ask_engines(self, request: Request) -> Sequence[str]:
        asked = self._router.probe(request)
        self.engine.note(asked)
        return asked

    # Weights and memory ----------------------------------------------------------------------------------

    def before_weights(self) -> None:
        self._pause()  # until something is to be generated

    def make_offloadable(self, config: OffloadConfig) -> None:
        """Does nothing: the engines keep by themselves what leaves the devices."""

    def sizes(self) -> dict[LeaseMode, int]:
        """Returns the bytes of weights; what the engines take beside them for their caches is the recipe's to bound."""
        return {"generate": self._weight_bytes}

    def onload(self, mode: LeaseMode) -> MoveResult:
        began = time.perf_counter()
        if not self._is_asleep:
            return MoveResult(0, 0, 0.0)
        self._router.wake()
        self._is_asleep = False
        return MoveResult(self._weight_bytes, -self._weight_bytes, time.perf_counter() - began)

    def offload(self) -> MoveResult:
        began = time.perf_counter()
        if self._is_asleep:
            return MoveResult(0, 0, 0.0)
        self._pause()
        self._router.sleep(self._sleep_level)
        self._is_asleep = True
        return MoveResult(self._weight_bytes, self._weight_bytes, time.perf_counter() - began)

    def stop_offloading(self) -> None:
        """Does nothing: the engines end with the run."""

    def _offload(self, store: OffloadStore) -> Offload:
        raise AssertionError("engines move their own parts")
