"""Metrics to a tracker as well, when asked: wandb or trackio, which keep the same three calls."""

import importlib
from collections.abc import Mapping
from typing import Any

from nanorun.errors import UserError

TRACKERS = ("wandb", "trackio")


def require(kind: str) -> Any:
    """The tracker's package, or what to do."""
    if kind not in TRACKERS:
        raise UserError(f"There is no tracker '{kind}': choose {' or '.join(TRACKERS)}.")
    try:
        return importlib.import_module(kind)
    except ImportError as error:
        raise UserError(f"--track {kind} needs the package {kind}: pip install {kind}.") from error


class Tracker:
    """`Tracker("wandb", name, config)`; `log` takes the records that go to metrics.jsonl."""

    def __init__(self, kind: str, name: str, config: Mapping[str, Any]) -> None:
        self._module = require(kind)
        self._module.init(project="nanorun", name=name, config=dict(config), resume="allow")

    def log(self, record: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self._module.log(figures)

    def close(self) -> None:
        self._module.finish()
