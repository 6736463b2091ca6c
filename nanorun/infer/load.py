"""Load a trained model: the newest weights of a run, with its configuration and its tokenizer.

`eval`, `chat`, `serve` and `bench` all load models here. `ServedModel` adds what `chat` and `serve` need to
generate replies: the engine, the stop tokens and the tool.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanorun import checkpoint, hardware, home
from nanorun.config import Config, ModelConfig
from nanorun.console import command, say
from nanorun.errors import UserError
from nanorun.infer.engine import Engine, Settings, Tool
from nanorun.model.gpt import GPT, empty
from nanorun.runs import CHAT_KINDS, default_runs, load_config
from nanorun.text.store import open_tokenizer
from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.calls import ToolState, calculate, python_tool
from nanorun.tools.sandbox import Sandbox

ToolName = Literal["calculator", "python", "none"]


@dataclass(frozen=True)
class LoadedModel:
    run: str
    step: int
    config: Config
    model: GPT
    tokenizer: Tokenizer

    @property
    def is_chat_model(self) -> bool:
        return self.config.kind in CHAT_KINDS

    def __str__(self) -> str:
        return f"'{self.run}' ({'chat' if self.is_chat_model else 'base'} model)"


def load_model(run: str | None = None, *, prefer_chat: bool = False) -> LoadedModel:
    """Loads a run's newest weights on this machine's device, in its compute dtype.

    Without a name it loads the run that was trained last; if that is damaged, the one before. `prefer_chat` takes a
    base model only where there is no chat model.
    """
    if run is not None:
        return _load(run)
    candidates = default_runs(prefer_chat)
    for candidate in candidates:
        try:
            return _load(candidate)
        except UserError as error:
            if candidate == candidates[-1]:
                raise
            say(f"skipping the run '{candidate}': {error}")
    raise UserError(
        f"There is no trained model in {home.runs_dir()}: run {command('train base')} or {command('speedrun')}."
    )


def _load(run: str) -> LoadedModel:
    config = load_config(run)
    machine = hardware.detect()
    saved, tokenizer = newest_checkpoint(run), open_tokenizer(config.tokenizer)
    check_tokenizer(tokenizer, saved)
    device, dtype = torch.device(machine.device), hardware.compute_dtype(machine)
    model = model_from_weights(saved.model, config.model, device, dtype)
    return LoadedModel(run, saved.step, config, model.eval(), tokenizer)


def newest_checkpoint(run: str) -> checkpoint.Checkpoint:
    """The newest intact checkpoint of a run that another process may be training: nothing on disk changes."""
    saved = checkpoint.load_newest(home.runs_dir() / run / "checkpoints", repair=False)
    if saved is None:
        raise UserError(f"The run '{run}' has no checkpoint yet: continue its training.")
    return saved


def check_tokenizer(tokenizer: Tokenizer, saved: checkpoint.Checkpoint) -> None:
    """UserError if the weights of a checkpoint were trained with another tokenizer than this one."""
    recorded = saved.state.get("tokenizer")
    if recorded is None:
        say(f"{saved.path} does not record its tokenizer: using '{tokenizer.name}' as it is now")
    elif recorded != tokenizer.fingerprint:
        raise UserError(
            f"The weights in {saved.path} were trained with another tokenizer than '{tokenizer.name}' is now (its "
            f"fingerprint is {tokenizer.fingerprint[:12]}, not {recorded!s:.12}): restore that tokenizer, or train "
            "again with this one."
        )


def model_from_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> GPT:
    check_weights(weights, empty(config, torch.device("meta"), dtype))
    model = empty(config, device, dtype)
    model.load_state_dict(weights)
    model.init_buffers()
    return model


def check_weights(weights: Mapping[str, Tensor], model: GPT) -> None:
    """UserError unless the weights are those of a model of this shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected == found:
        return
    name = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    raise UserError(
        f"The checkpoint is not of the model that config.json describes: its {name} is {found.get(name, 'missing')}, "
        f"expected {expected.get(name, 'nothing')}. Restore the config.json, or the checkpoint, that belongs to it."
    )


class ServedModel:
    """A trained model with its engine. Close it, or use it as a context manager."""

    def __init__(
        self,
        run: str | None = None,  # None: the one that was trained last
        settings: Settings | None = None,
        *,
        tools: ToolName = "calculator",
        draft: str | None = None,  # the run of a smaller model, for speculative decoding
    ) -> None:
        function = python_tool(Sandbox.probe()) if tools == "python" else calculate
        loaded = load_model(run)
        self.was_named = run is not None
        self.name, self.step, self.config = loaded.run, loaded.step, loaded.config
        self.tokenizer = tokenizer = loaded.tokenizer
        self.is_chat_model = loaded.is_chat_model
        if tools == "python" and not self.is_chat_model:
            raise UserError(
                f"'{self.name}' is a base model, which only continues text: leave out --tools python."
            )
        loaded_draft = load_model(draft) if draft is not None else None
        if loaded_draft is not None and loaded_draft.config.tokenizer != self.config.tokenizer:
            raise UserError(
                f"The draft model '{draft}' uses the tokenizer '{loaded_draft.config.tokenizer}', and "
                f"'{self.name}' uses '{self.config.tokenizer}': choose a draft model with the same tokenizer."
            )
        self.engine = Engine(
            loaded.model, tokenizer, settings, draft=loaded_draft.model if loaded_draft is not None else None
        )
        self.tool_name = tools if self.is_chat_model and tools != "none" else None
        self.tool: Callable[[], Tool] | None = None
        if self.tool_name is not None:
            self.tool = lambda: ToolState(tokenizer, function)
        # Every special token that begins another message ends a reply. A base model was not trained on the tokens
        # of tool calls, so those end it too.
        tool_tokens = {name for name in tokenizer.special if "python" in name or "output" in name}
        allowed = tool_tokens if self.is_chat_model else set()
        self.stop_ids = [token_id for name, token_id in tokenizer.special.items() if name not in allowed]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
