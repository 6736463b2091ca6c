"""Load a trained model: the newest weights of a run, with its configuration and its tokenizer.

`eval`, `chat`, `serve` and `bench` all load models here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorun import checkpoint, hardware, home
from nanorun.config import Config, ModelConfig
from nanorun.console import say
from nanorun.errors import UserError
from nanorun.model.gpt import GPT, empty
from nanorun.runs import loadable_runs, read_config
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    run: str
    step: int
    config: Config
    model: GPT
    tokenizer: Tokenizer


def load_model(run: str | None = None, candidates: Sequence[str] | None = None) -> LoadedModel:
    """Loads a run's newest weights on this machine's device, in its compute dtype.

    Without a run name it loads the first of the candidates (default: all runs, newest first) that is intact.
    """
    if run is not None:
        return _load(run)
    candidates = [run.name for run in loadable_runs()] if candidates is None else candidates
    for candidate in candidates:
        try:
            return _load(candidate)
        except UserError as error:
            if candidate == candidates[-1]:
                raise
            say(f"skipping the run '{candidate}': {error}")
    raise UserError(
        f"There is no trained model in {home.runs_dir()}: run nanorun train base or nanorun speedrun."
    )


def _load(run: str) -> LoadedModel:
    config = Config.from_dict(read_config(run))
    machine = hardware.detect()
    saved = newest_checkpoint(run)
    device, dtype = torch.device(machine.device), hardware.compute_dtype(machine)
    model = model_from_weights(saved.model, config.model, device, dtype)
    return LoadedModel(run, saved.step, config, model.eval(), open_tokenizer(config.tokenizer))


def newest_checkpoint(run: str) -> checkpoint.Checkpoint:
    """The newest intact checkpoint of a run that another process may be training: nothing on disk changes."""
    saved = checkpoint.load_newest(home.runs_dir() / run / "checkpoints", repair=False)
    if saved is None:
        raise UserError(f"The run '{run}' has no checkpoint yet: continue its training.")
    return saved


def model_from_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> GPT:
    model = empty(config, device, dtype)
    model.load_state_dict(weights)
    model.init_buffers()
    return model
