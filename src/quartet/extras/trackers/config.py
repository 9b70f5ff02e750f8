"""The sections of ``log.trackers`` for wandb, trackio and mlflow, and what these need before a run."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from quartet.config.common import BaseTrackerConfig
from quartet.config.errors import UserError, describe_error


class _Package(BaseTrackerConfig):
    """A tracker whose package and extra are called as its ``type``."""

    def check(self) -> None:
        """Does what ``TrackerConfig.check`` does."""
        if importlib.util.find_spec(self.type) is None:
            raise UserError(
                f"the tracker {self.type} needs a package that is not installed",
                found=f"log.trackers names {self.type}; there is no module of that name",
                remedy=f"pip install 'quartet-rl[{self.type}]', or leave it out of log.trackers",
            )
        if (lacking := self._lacking()) is not None:
            raise UserError(f"the tracker {self.type} cannot reach its server", found=lacking[0], remedy=lacking[1])

    def _lacking(self) -> tuple[str, str] | None:
        """Says what is not there that the server asks for, and what to do; None where all is."""
        raise NotImplementedError


class WandbConfig(_Package):
    """Weights & Biases; needs the extra `wandb`."""

    type: Literal["wandb"] = "wandb"
    project: str = Field("quartet", min_length=1, description="Project that the run is shown in.")
    entity: str | None = Field(None, description="Team or user; the key's own when left out.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    tags: tuple[str, ...] = Field((), description="Words to find the run by.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: files in the run's directory, for `wandb sync`. Left out: WANDB_MODE, else online."
    )

    @property
    def chosen_mode(self) -> Any:
        """The mode, or what the environment says of it."""
        return self.mode or os.environ.get("WANDB_MODE", "online")

    def _lacking(self) -> tuple[str, str] | None:
        if self.chosen_mode != "online":
            return None
        import wandb

        remedy = "wandb login, or export WANDB_API_KEY=…; mode: offline needs none"
        try:
            has_key = wandb.run is not None or wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            return describe_error(error), remedy
        return None if has_key else ("no API key of Weights & Biases", remedy)


class TrackioConfig(_Package):
    """Trackio, on this machine or in a Space of the hub; needs the extra `trackio`."""

    type: Literal["trackio"] = "trackio"
    project: str = Field("quartet", min_length=1, description="Project that the run is shown in.")
    space_id: str | None = Field(None, description="Space of the hub, user/name; this machine when left out.")

    def _lacking(self) -> tuple[str, str] | None:
        from huggingface_hub import get_token

        if self.space_id is None or get_token() is not None:
            return None
        return f"space_id {self.space_id}, and no token of the hub", "hf auth login, or export HF_TOKEN=…"


class MLflowConfig(_Package):
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

    def _lacking(self) -> tuple[str, str] | None:
        if self.uri or os.environ.get("MLFLOW_TRACKING_URI"):
            return None
        return "neither uri nor MLFLOW_TRACKING_URI", "set one of them: http://host:port, or sqlite:///mlflow.db"
