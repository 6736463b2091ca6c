"""Experiment trackers, which also get the metrics on request: wandb or trackio, which share an API of three calls."""

import importlib
from collections.abc import Mapping
from typing import Any, Literal

from nanorun.errors import UserError

TrackerName = Literal["wandb", "trackio"]


def require(kind: TrackerName) -> Any:
    """Imports the tracker's package, or says how to install it."""
    try:
        return importlib.import_module(kind)
    except ImportError as error:
        raise UserError(f"--track {kind} needs the package {kind}: pip install {kind}.") from error


class Tracker:
    """`Tracker("wandb", name, config)`. `log` takes the records that are written to metrics.jsonl."""

    def __init__(self, kind: TrackerName, name: str, config: Mapping[str, Any]) -> None:
        self._module = require(kind)
        self._module.init(project="nanorun", name=name, config=dict(config), resume="allow")

    def log(self, record: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self._module.log(figures)

    def close(self) -> None:
        self._module.finish()
