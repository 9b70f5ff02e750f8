"""Episodes with an environment: what it is, and how far an episode may go."""

from __future__ import annotations

from pydantic import Field, JsonValue

from quartet.config.common import Strict


class EnvironmentConfig(Strict):
    """A Python class that answers the policy's actions; ``rollout.sampling`` holds for each of its turns."""

    target: str | None = Field(
        None, description="path/to/file.py:Class or package.module:Class; left out only from Python, which passes it."
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")
    max_turns: int = Field(8, ge=1, description="Actions of an episode; one that is not done then is truncated.")
    max_tokens: int | None = Field(
        None, ge=2, description="Longest sequence, state and action together; the model's context when left out."
    )
    max_environments: int = Field(64, ge=1, description="Episodes that are played at a time.")
    timeout_s: float = Field(60.0, gt=0, description="Longest reset or step.")
    weight: float = Field(1.0, description="Factor of the environment's own rewards in the score.")
