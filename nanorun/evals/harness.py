"""Our models in EleutherAI's lm-evaluation-harness, for the hundreds of tasks beyond CORE.

    pip install lm_eval
    python -m nanorun.evals.harness --model nanorun --model_args model=base-d12 --tasks hellaswag

Importing this file needs lm_eval and registers the name `nanorun` with it; nothing else imports this file.
Requests with the same context become one example with several choices, so the batches are CORE's. The engine of
`nanorun chat` generates text.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanorun.evals.core import default_batch_tokens
from nanorun.evals.core_models import NanorunModel
from nanorun.evals.core_prompts import EncodedTask
from nanorun.evals.core_scoring import score_tasks
from nanorun.infer.engine import Engine, Request, Sampling
from nanorun.infer.load import load_model
from nanorun.model.gpt import GPT
from nanorun.text.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]  # context and continuation


@register_model("nanorun")
class NanorunLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """`model` is a run's name (default: the newest), or a model itself with its tokenizer."""

    def __init__(
        self,
        model: str | GPT | None = None,
        text: Tokenizer | None = None,
        batch_tokens: int | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, GPT):
            assert text is not None, "a model needs its tokenizer"
            self.gpt, self.text = model, text
        else:
            loaded = load_model(model)
            self.gpt, self.text = loaded.model, loaded.tokenizer
        self.scorer = NanorunModel(self.gpt)
        self.batch_tokens = int(batch_tokens or default_batch_tokens(self.scorer.device))

    @property
    def eot_token_id(self) -> int:
        return self.text.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """With a leading BOS, as in training, unless `add_special_tokens` is False."""
        tokens = self.text.encode(string)
        return tokens if add_special_tokens is False else [self.text.bos, *tokens]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **ignored: Any) -> list[tuple[float, bool]]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._score([pair for pairs in windows for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        with Engine(self.gpt, self.text) as engine:
            replies = engine.generate([self._request(*request.args) for request in requests])
        return [reply.text or "" for reply in replies]

    def _windows(self, text: str) -> list[Pair]:
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.eot_token_id, self.scorer.context - 1, 1)
        return [make_disjoint_window(window) for window in windows]

    def _request(self, prompt: str, options: dict[str, Any]) -> Request:
        until = options.get("until") or []
        max_tokens = int(options.get("max_gen_toks", 256))
        room = max(self.scorer.context - max_tokens, 1)
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        return Request(
            self.tok_encode(prompt)[-room:],
            Sampling(temperature=temperature),
            max_tokens=max_tokens,
            stop_ids=[self.text.bos],
            stop=[until] if isinstance(until, str) else list(until),
        )

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the greedy one."""
        if not pairs:
            return []
        scores = score_tasks(self.scorer, [as_examples(pairs)], self.batch_tokens)
        lengths = [len(continuation) for _, continuation in pairs]
        return [
            (-float(loss) * length, bool(is_greedy))
            for loss, length, is_greedy in zip(scores.losses, lengths, scores.is_greedy, strict=True)
        ]


def as_examples(pairs: Sequence[Pair]) -> EncodedTask:
    """Consecutive pairs with the same context are the choices of one example."""
    examples = []
    for context, group in groupby(pairs, key=lambda pair: pair[0]):
        continuations = [np.array(continuation, dtype=np.int64) for _, continuation in group]
        examples.append((np.array(context, dtype=np.int64), continuations, list(map(len, continuations))))
    return EncodedTask.from_examples(examples, [0] * len(examples))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
