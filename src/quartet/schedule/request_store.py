"""What rollout workers are asked for, in text, and the tokens that they keep of what came of it.

Token ids stay in a rollout worker's process until their group is complete: prompts are tokenised here, completions
decoded, and the transcripts of episodes kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import STEP_PREFIX, Trajectory, TrajectorySequence
from quartet.envs.episode import FinishedEpisode
from quartet.envs.transcript import SOURCE, Action, EpisodeLimits, Seen, Transcript
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.schedule.groups import answered, group_batch
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec


@dataclass(frozen=True)
class SampleRequest:
    """One response."""

    request_id: str
    sampling: SamplingParams


@dataclass(frozen=True)
class PromptRequest:
    """Responses to one prompt, which are submitted together. ``group`` names them in the engine."""

    group: str
    prompt: PromptText
    samples: tuple[SampleRequest, ...]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(sample.request_id for sample in self.samples)

    @property
    def lengths(self) -> dict[str, int]:
        """Most tokens of each."""
        return {sample.request_id: sample.sampling.max_new_tokens for sample in self.samples}


@dataclass(frozen=True)
class TurnRequest:
    """The next action of an episode, after what its policy has ``seen``."""

    request_id: str
    episode: str
    seen: Seen
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
    """What the completion adds to its prompt, up to a stop string and without end-of-text."""
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
        """What the engine is to do; at once an end where the state leaves no room for an action.

        Raises:
            StateError: a state that cannot be tokenised.
            UserError: a prompt that cannot.
        """
        if isinstance(asked, TurnRequest):
            return self._turn(asked)
        ids = tuple(self._codec.encode_prompt(asked.prompt))
        self._prompts.update((sample.request_id, ids) for sample in asked.samples)
        return [Request(sample.request_id, asked.group, ids, sample.sampling) for sample in asked.samples]

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
        """Requests that are not waited for any more, and the episodes that they belong to."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
            self._completions.pop(request_id, None)
            if (episode := self._episodes.pop(request_id, None)) is not None:
                self._transcripts.pop(episode, None)

    def responses(self, index: int, request_ids: Sequence[str], greedy: str | None = None) -> RaggedBatch:
        """The group of these completions, which are not kept any longer; ``greedy`` is the baseline's."""
        made = tuple(self._response(request_id) for request_id in request_ids)
        return group_batch(index, made, None if greedy is None else self._response(greedy))

    def _response(self, request_id: str) -> Trajectory:
        ids, made = self._prompts.pop(request_id), self._completions.pop(request_id)
        return answered(ids, made, completion_text(self._codec, ids, made))

    def episodes(self, index: int, endings: Sequence[FinishedEpisode], version: int) -> RaggedBatch:
        """The group of these episodes, which are not kept any longer; ``version`` is that of the present weights."""
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
        """What stands for an episode that failed, at whatever turn: one token, which nothing is learned from."""
        assert ending.prompt is not None, "only failed episodes have no transcript"
        ids = tuple(self._codec.encode_prompt(ending.prompt))
        columns = {STEP_PREFIX + SOURCE: (0.0,)}
        return TrajectorySequence(ids, ids[-1:], (True,), (0.0,), (version,), ending.end.value, columns=columns)
