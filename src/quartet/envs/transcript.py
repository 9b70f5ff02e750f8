"""The token bookkeeping of an episode: which tokens the policy read, which it emitted, and where a sequence ends.

Tokens are only ever appended, never tokenised again. After an action the new state either extends what the sequence
holds, and the sequence goes on with the tokens of the new part alone, or it does not, and another sequence begins::

    sequence 0   state        action       observation  action
    token_ids                 7 8 </s>     5 6          9 </s>
    action_mask               1 1 1        0 0          1 1
    sequence 1   rewritten state, other tokens          action
                                                        4 </s>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.batch.trajectory import STEP_PREFIX, TrajectorySequence
from quartet.config.errors import UserError
from quartet.envs.protocol import Observation
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec

SOURCE = "environment"
"""Name of the environment's own rewards among the sources of reward: each stands on the last token of its turn."""


class StateError(UserError):
    """The state of an environment that cannot be tokenised."""


@dataclass(frozen=True)
class EpisodeLimits:
    """How far an episode may go.

    Attributes:
        max_turns: actions.
        max_sequence_tokens: tokens of a sequence, its prompt included.
        max_tokens: tokens of all sequences together; None for no limit.
        timeout_s: seconds that one call of the environment may take.
    """

    max_turns: int
    max_sequence_tokens: int
    max_tokens: int | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True)
class ObservedState:
    """What the policy sees before an action: the observation, a whole state (``rewrites``) or what is added to it, and
    the reward of the action before, None where that had none; ``begins``: an episode, perhaps once more."""

    observation: Observation
    reward: float | None = None
    begins: bool = False


@dataclass(frozen=True)
class Action:
    """What an engine generated in one turn; all per-token columns have equal lengths.

    Attributes:
        token_ids: as sampled, with the end-of-text token where there is one.
        logprobs: of each token, in nats.
        versions: of the weights that computed each token's distribution.
        finish_reason: ``stop``, ``stop_string`` or ``length``.
        text_end: characters of the text before the stop string; None without one.
        columns: further numbers of each token by name; tokens of observations have 0 there.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    text_end: int | None = None
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class _Open:
    """The sequence that is being made. ``text`` is what its tokens say, less the end-of-text token of the last
    action."""

    state: PromptText
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    answered: PromptText = ""
    completion: str = ""
    last: Action | None = None
    num_turns: int = 0

    def append(self, tokens: Action, *, is_action: bool) -> None:
        num = len(tokens.token_ids)
        for name, values in tokens.columns.items():
            self.columns.setdefault(name, [0] * len(self.token_ids)).extend(values)
        self.token_ids.extend(tokens.token_ids)
        self.action_mask.extend([is_action] * num)
        self.logprobs.extend(tokens.logprobs)
        self.rewards.extend([0.0] * num)
        self.versions.extend(tokens.versions)
        for column in self.columns.values():
            column.extend([0] * (len(self.token_ids) - len(column)))

    def closed(self) -> TrajectorySequence | None:
        """Returns the sequence without the observation that nothing answers; None where nothing was done."""
        if self.last is None:
            return None
        end = len(self.action_mask) - self.action_mask[::-1].index(True)
        return TrajectorySequence(
            self.prompt_ids,
            tuple(self.token_ids[:end]),
            tuple(self.action_mask[:end]),
            tuple(self.logprobs[:end]),
            tuple(self.versions[:end]),
            self.last.finish_reason,
            self.num_turns,
            {
                STEP_PREFIX + SOURCE: tuple(self.rewards[:end]),
                **{name: tuple(column[:end]) for name, column in self.columns.items()},
            },
            self.answered,
            self.completion,
            self.last.text_end,
        )


class Transcript:
    """The sequences of one episode, which begin with the first thing seen."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._closed: list[TrajectorySequence] = []
        self._last: _Open | None = None

    @property
    def _open(self) -> _Open:
        assert self._last is not None, "nothing was seen"
        return self._last

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids that the policy reads now."""
        return (*self._open.prompt_ids, *self._open.token_ids)

    def room(self, limits: EpisodeLimits) -> int:
        """Returns how many tokens the next action may have."""
        held = len(self.token_ids)
        room = limits.max_sequence_tokens - held
        if limits.max_tokens is not None:
            closed = sum(len(sequence.prompt_ids) + len(sequence.token_ids) for sequence in self._closed)
            room = min(room, limits.max_tokens - closed - held)
        return room

    def see(self, seen: ObservedState) -> None:
        """Books the reward of the action just appended, and goes on with the state after it.

        Raises:
            StateError: a state without tokens, messages that the chat template refuses, or text for a state of
                messages or the other way round.
        """
        if seen.reward is not None:
            self.earn(seen.reward)
        try:
            if self._last is None:
                self._last = self._begin(seen.observation.content)
            else:
                self._observe(seen.observation)
        except UserError as error:
            raise StateError(error.problem, found=error.found, remedy=error.remedy) from None

    def sequences(self) -> tuple[TrajectorySequence, ...]:
        """Returns all sequences in which the policy acted."""
        last = self._open.closed()
        return (*self._closed, *([last] if last is not None else []))

    def act(self, action: Action) -> str:
        """Appends an action; returns its text without end-of-text, up to a stop string."""
        now, codec, before = self._open, self._codec, self.token_ids
        shown = codec.decode_completion(before, action.token_ids)
        now.text += codec.decode_completion(before, action.token_ids, whole=True).removesuffix(self._end_text(action))
        now.answered = now.state
        # What was sampled stays in the state, also the stop string that the environment is not shown.
        now.state = now.text if isinstance(now.state, str) else [*now.state, {"role": "assistant", "content": shown}]
        now.completion = shown if action.text_end is None else shown[: action.text_end]
        now.last = action
        now.num_turns += 1
        now.append(action, is_action=True)
        return now.completion

    def earn(self, reward: float) -> None:
        """Books the reward of the action just appended."""
        self._open.rewards[-1] = float(reward)

    def _observe(self, observation: Observation) -> None:
        """Goes on with the sequence where the new state extends it, else with another one."""
        now, content = self._open, observation.content
        if observation.rewrites:
            state = content
        elif isinstance(now.state, str) and isinstance(content, str):
            state = now.text + content
        elif not isinstance(now.state, str) and not isinstance(content, str):
            state = [*now.state, *content]
        else:
            raise _other_kind(now.state)
        text = self._text(state)
        added = self._added(state, text, declared=not observation.rewrites)
        if added is None:
            ended = now.closed()
            if ended is not None:
                self._closed.append(ended)
            self._last = self._begin(state)
            return
        now.state, now.text = state, text
        now.append(Action(added, (0.0,) * len(added), (-1,) * len(added), "read"), is_action=False)

    def _begin(self, state: PromptText) -> _Open:
        return _Open(state, self._text(state), tuple(self._codec.encode_prompt(state)))

    def _text(self, state: PromptText) -> str:
        return state if isinstance(state, str) else self._codec.render(state)

    def _added(self, state: PromptText, text: str, *, declared: bool) -> tuple[int, ...] | None:
        """Returns the tokens by which ``state`` extends the sequence; None where it does not.

        Args:
            declared: the environment said that it adds to the state; a template may rewrite it all the same.
        """
        now, codec = self._open, self._codec
        held = [] if isinstance(now.state, str) else codec.placed(now.state)
        pictures = [] if isinstance(state, str) else codec.placed(state)
        # Other pictures; or the same, which stand otherwise beside another one (LLaVA-OneVision).
        if not text.startswith(now.text) or pictures[: len(held)] != held:
            return None
        tail = text[len(now.text) :]
        end = self._end_text(now.last)
        # A template writes the end of the turn, which the policy has sampled already; other text knows nothing of it.
        if not isinstance(state, str) and not tail.startswith(end):
            return None
        tail = tail.removeprefix(end)
        added = tuple(codec.encode_continuation(tail, pictures[len(held) :])) if tail else ()
        is_promised = declared and isinstance(state, str)
        if not is_promised and codec.decode_completion(self.token_ids, added, whole=True) != tail:
            return None
        return added

    def _end_text(self, action: Action | None) -> str:
        """Returns the end-of-text token that ends the action, as text; empty where none does."""
        if action is None or action.token_ids[-1] not in self._codec.eos_ids:
            return ""
        return self._codec.decode(action.token_ids[-1:], skip_special=False)


def _other_kind(state: PromptText) -> UserError:
    held, given = ("text", "messages") if isinstance(state, str) else ("messages", "text")
    return UserError(
        "an observation does not fit the state that it adds to",
        found=f"the state is {held}, the observation {given}",
        remedy=f"return {held}, or Observation(…, rewrites=True) for a whole new state",
    )
