"""`eval bpb`: a trained model on validation text, the whole of it, the model's own or another dataset's."""

from collections.abc import Sequence
from typing import Any

import torch

from nanorun import checkpoint, hardware, home
from nanorun.config import Config
from nanorun.console import say
from nanorun.data.dataset import open_dataset
from nanorun.errors import UserError
from nanorun.model.gpt import GPT, empty
from nanorun.provenance import record
from nanorun.runs import loadable_runs, read_config
from nanorun.text.store import open_tokenizer
from nanorun.train.base import compute_dtype, evaluator, fitting_rows

Loaded = tuple[str, int, Config, GPT]


def load_model(name: str | None = None, choices: Sequence[str] | None = None) -> Loaded:
    """A run's newest weights on this machine's device: its name, the step, its configuration, the model.

    Without a name it is the first of the choices (all runs, the newest first) that is not damaged.
    """
    if name is not None:
        return _load(name)
    choices = [run.name for run in loadable_runs()] if choices is None else choices
    for choice in choices:
        try:
            return _load(choice)
        except UserError as error:
            if choice == choices[-1]:
                raise
            say(f"passing over the run '{choice}': {error}")
    raise UserError(
        f"There is no trained model in {home.runs_dir()}: nanorun train base or speedrun makes one."
    )


def _load(name: str) -> Loaded:
    config = Config.from_dict(read_config(name))
    found = checkpoint.load_newest(home.runs_dir() / name / "checkpoints", repair=False)
    if found is None:
        raise UserError(f"The run '{name}' has no checkpoint yet: let it train on.")
    machine = hardware.detect()
    device = torch.device(machine.device)
    dtype = compute_dtype(machine)
    model = empty(config.model, device, dtype)
    model.load_state_dict(found.model)
    model.init_buffers()
    return name, found.step, config, model.eval()


def evaluate_run(name: str | None, data: str | None, max_tokens: int | None) -> dict[str, Any]:
    name, step, config, model = load_model(name)
    dataset, tokenizer = open_dataset(data or config.data), open_tokenizer(config.tokenizer)
    rows = fitting_rows(config, hardware.detect())
    evaluate = evaluator(config, dataset, tokenizer, model, model.embed.weight.device, rows, max_tokens)
    result = evaluate()
    return record(
        "bpb",
        model=name,
        step=step,
        data=dataset.name,
        bpb=result.bpb,
        loss=result.loss,
        tokens=result.tokens,
        bytes=result.bytes,
    )
