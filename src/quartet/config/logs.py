"""Where a run's figures go, what it says when it ends, and which Python objects are called on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, field_validator

from quartet.config.strict import Rows, Steps, Strict


class TensorBoardConfig(Strict):
    """Event files for TensorBoard, in the run's directory."""

    type: Literal["tensorboard"] = "tensorboard"


class WandbConfig(Strict):
    """Weights & Biases; needs the extra `wandb`."""

    type: Literal["wandb"] = "wandb"
    project: str = Field("quartet", min_length=1, description="Project that the run is shown in.")
    entity: str | None = Field(None, description="Team or user; the key's own when left out.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: tuple[str, ...] = Field((), description="Words to find the run by.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: files in the run's directory, for `wandb sync`. Left out: WANDB_MODE, else online."
    )


class TrackioConfig(Strict):
    """Trackio, on this machine or in a Space of the hub; needs the extra `trackio`."""

    type: Literal["trackio"] = "trackio"
    project: str = Field("quartet", min_length=1, description="Project that the run is shown in.")
    space_id: str | None = Field(None, description="Space of the hub, user/name; this machine when left out.")


class MLflowConfig(Strict):
    """MLflow; needs the extra `mlflow`."""

    type: Literal["mlflow"] = "mlflow"
    uri: str | None = Field(
        None, description="Server or store, http://host:port or sqlite:///mlflow.db. Left out: MLFLOW_TRACKING_URI."
    )
    experiment: str = Field("quartet", min_length=1, description="Experiment that the run belongs to.")

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).password is not None:
            raise ValueError(
                "the uri holds a password, which would be saved: set it as MLFLOW_TRACKING_URI, or "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the environment"
            )
        return value


def _by_name(value: Any) -> Any:
    """A tracker's name alone stands for it with its defaults."""
    if isinstance(value, str):
        return {"type": value}
    # What a validator returns is no longer read as JSON, which has no tuples.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()} if isinstance(value, dict) else value


TrackerConfig = Annotated[
    Annotated[TensorBoardConfig | WandbConfig | TrackioConfig | MLflowConfig, Field(discriminator="type")],
    BeforeValidator(_by_name),
]


class NotifyConfig(Strict):
    """Messages about the run, through apprise; needs the extra `notify`."""

    urls: tuple[SecretStr, ...] = Field(
        (), description="Apprise addresses (slack://…, mailto://…); kept out of the saved recipe, which shows stars."
    )
    urls_env: str | None = Field(
        None, description="Environment variable with addresses, separated by spaces; never saved or logged."
    )
    on: tuple[Literal["end", "failure", "alarm"], ...] = Field(
        ("end", "failure", "alarm"), min_length=1, description="What is told; a run that a signal stops has ended."
    )

    def _misfits(self) -> Iterator[str]:
        if not self.urls and self.urls_env is None:
            yield "messages need an address: set urls_env or urls"


class LogConfig(Strict):
    """What is written and told beside metrics.jsonl."""

    trackers: tuple[TrackerConfig, ...] = Field(
        (TensorBoardConfig(),), description="Where metrics and samples also go; a name, or a type with its keys."
    )
    tensorboard: bool = Field(True, description="false leaves tensorboard out of trackers.")
    samples: Rows = Field(
        8, ge=0, description="Rows of the tables that trackers get of kept rollouts and of evaluations."
    )
    rollouts_every: Steps = Field(1, ge=1, description="Steps between kept rollouts.")
    notify: NotifyConfig | None = Field(None, description="Messages when the run ends or fails, or of an alarm; none.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Least severity that Python's logger `quartet` writes to stderr, in every process."
    )

    def _misfits(self) -> Iterator[str]:
        kinds = [tracker.type for tracker in self.trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            yield f"trackers names {twice[0]} twice"

    @property
    def chosen_trackers(self) -> tuple[TensorBoardConfig | WandbConfig | TrackioConfig | MLflowConfig, ...]:
        return tuple(t for t in self.trackers if self.tensorboard or t.type != "tensorboard")


class CallbackConfig(Strict):
    """A Python class that is told of a run's steps, and may end it."""

    target: str = Field(description="path/to/file.py:Class or package.module:Class, derived from quartet.Callback.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the class.")
