"""Trackers of other packages: wandb, trackio, mlflow."""

from quartet.config.plugins import Plugin, TrackerType

_HERE = "quartet.extras.trackers"
PLUGIN = Plugin(
    trackers={
        "wandb": TrackerType(f"{_HERE}.config:WandbConfig", f"{_HERE}.clients:WandbTracker"),
        "trackio": TrackerType(f"{_HERE}.config:TrackioConfig", f"{_HERE}.clients:TrackioTracker"),
        "mlflow": TrackerType(f"{_HERE}.config:MLflowConfig", f"{_HERE}.clients:MLflowTracker"),
    }
)
