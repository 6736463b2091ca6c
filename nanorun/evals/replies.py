"""Asking a model many questions at once: what it replies to each, or which letter it would choose.

A question with letters (multiple choice) is answered without generating: one forward pass over a batch of
prompts, and the letter whose token is likeliest to come next. A letter may have several spellings in a
vocabulary ("A", " A"), whose probabilities are added up; where it has no token of its own, whole answers are
compared instead. Every other question is answered by the engine, many at a time, with the calculator at hand.

What is asked and how it is drawn depends on the question alone: each has a seed of its own, made from its task
and number. So in fp32 the answers do not depend on the batch or on how many other questions there are.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanorun.config import ModelConfig
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.model.gpt import GPT
from nanorun.model.loss import IGNORE
from nanorun.tasks.task import Conversation, Task, question_messages
from nanorun.text.chat import Part, parse_reply, render_prompt
from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.calls import ToolState

CACHE_SHARE = 0.15  # of a GPU's memory, for the texts that are written at a time
CACHE_BYTES = 2 * 2**30  # of a CPU's
LONGEST_LETTER = 16  # tokens that are kept free for one


@dataclass(frozen=True)
class Manner:
    """How replies are made."""

    max_tokens: int = 512
    temperature: float = 0.0  # 0: the likeliest
    samples: int = 1  # replies to each question
    seed: int = 0
    batch: int = 64  # questions at a time


@dataclass(frozen=True)
class Answer:
    task: str
    index: int  # the question's number in its task
    sample: int
    question: str
    reply: list[Part]
    finish: str  # stop, length, or letter
    reward: float | None = field(default=None)  # None: not judged


def answer_task(
    model: GPT,
    tokenizer: Tokenizer,
    name: str,
    task: Task,
    indices: Sequence[int],
    manner: Manner,
    tick: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """All answers to these questions of a task, in their order."""
    if task.letters is not None:
        return _choose(model, tokenizer, name, task, indices, manner.batch, tick)
    slots = fitting_slots(model.config, model.embed.weight.device, manner.batch, model.dtype.itemsize)
    settings = Settings(slots=slots, tool_threads=0)
    requests = [
        make_request(
            prompt_of(task[i], tokenizer, model.config.context, manner.max_tokens),
            tokenizer,
            Sampling(temperature=manner.temperature, seed=seed_of(manner.seed, name, i)),
            manner.max_tokens,
            manner.samples if manner.temperature else 1,
        )
        for i in indices
    ]
    with Engine(model, tokenizer, settings) as engine:
        replies = iter(engine.generate(requests, tick))
    return [
        Answer(name, i, sample, asked(task[i]), parse_reply((r := next(replies)).ids, tokenizer), r.finish)
        for i, request in zip(indices, requests, strict=True)
        for sample in range(request.samples)
    ]


def prompt_of(conversation: Conversation, tokenizer: Tokenizer, context: int, max_tokens: int) -> list[int]:
    """The question as tokens; one too long for the context and an answer loses its beginning."""
    ids = render_prompt(question_messages(conversation), tokenizer)
    most = context - min(max_tokens, context // 2)
    return ids if len(ids) <= most else [tokenizer.bos, *ids[len(ids) - most + 1 :]]


def make_request(
    prompt: list[int],
    tokenizer: Tokenizer,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    logprobs: int | None = None,
) -> Request:
    """Whatever begins another message ends a reply; a call of the tool does not."""
    stops = [i for name, i in tokenizer.special.items() if "python" not in name and "output" not in name]
    return Request(
        prompt,
        sampling,
        max_tokens=max_tokens,
        stop_ids=stops,
        samples=samples,
        logprobs=logprobs,
        tool=lambda: ToolState(tokenizer),
    )


def seed_of(*parts: object) -> int:
    """A seed that depends on nothing else; three bits are left free, for a seed of each sample behind it."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 3


def asked(conversation: Conversation) -> str:
    """A question as a person reads it."""
    messages = question_messages(conversation)
    texts = [_text(message["content"]) for message in messages]
    if len(messages) == 1:
        return texts[0]
    return "\n\n".join(f"{m['role']}: {text}" for m, text in zip(messages, texts, strict=True))


def fitting_slots(config: ModelConfig, device: torch.device, wanted: int, itemsize: int) -> int:
    """How many texts are written at a time: as many as are wanted, where the cache has room for them."""
    size = 2 * config.depth * config.kv_heads * config.head_dim * config.context * itemsize
    room = float(CACHE_BYTES)
    if device.type == "cuda":
        room = CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory
    return max(min(wanted, int(room / size)), 1)


def _choose(
    model: GPT,
    tokenizer: Tokenizer,
    name: str,
    task: Task,
    indices: Sequence[int],
    batch: int,
    tick: Callable[[], None],
) -> list[Answer]:
    room = LONGEST_LETTER
    prompts = [prompt_of(task[i], tokenizer, model.config.context, room) for i in indices]
    letters = [letters_of(task, i) for i in indices]
    chosen = [""] * len(indices)
    by_length = sorted(range(len(indices)), key=lambda at: len(prompts[at]))  # little padding
    for start in range(0, len(by_length), batch):
        part = by_length[start : start + batch]
        found = choose_letters(model, tokenizer, [prompts[at] for at in part], [letters[at] for at in part])
        for at, letter in zip(part, found, strict=True):
            chosen[at] = letter
            tick()
    return [
        Answer(name, i, 0, asked(task[i]), [{"type": "text", "text": letter}], "letter")
        for i, letter in zip(indices, chosen, strict=True)
    ]


def letters_of(task: Task, index: int) -> Sequence[str]:
    """A task may have questions with fewer choices than others, and say so by `letters_of(index)`."""
    own: Any = getattr(task, "letters_of", None)
    found: Sequence[str] = own(index) if own is not None else (task.letters or ())
    return found


@torch.no_grad()
def choose_letters(
    model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], letters: Sequence[Sequence[str]]
) -> list[str]:
    """The likeliest of its letters for each prompt."""
    logits = _next_logits(model, prompts)
    chosen = []
    for row, prompt, mine in zip(logits, prompts, letters, strict=True):
        spellings = [_spellings(tokenizer, letter) for letter in mine]
        if all(spellings) and len({ids[0] for ids in spellings}) == len(mine):
            scores = torch.stack([row[ids].logsumexp(0) for ids in spellings])
        else:
            scores = _whole_answers(model, tokenizer, prompt, mine)
        chosen.append(mine[int(scores.argmax())])
    return chosen


def _spellings(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens that are this letter, the one that begins an answer first."""
    ways = [tokenizer.encode(text) for text in (letter, f" {letter}")]
    return list(dict.fromkeys(ids[0] for ids in ways if len(ids) == 1)) if len(ways[0]) == 1 else []


def _next_logits(model: GPT, rows: Sequence[Sequence[int]]) -> Tensor:
    """fp32 logits (B, vocabulary) after the last token of each row. Attention is causal: padding is not seen."""
    device = model.embed.weight.device
    ends = torch.tensor([len(row) - 1 for row in rows], device=device)
    hidden = model.hidden(padded(rows).to(device))[torch.arange(len(rows), device=device), ends]
    z = model.head(hidden)[:, : model.config.vocab_size].float()
    cap = model.config.softcap
    return cap * torch.tanh(z / cap) if cap else z


def _whole_answers(model: GPT, tokenizer: Tokenizer, prompt: Sequence[int], letters: Sequence[str]) -> Tensor:
    """The log-probability of each letter, with the end of the answer behind it."""
    end = tokenizer.special["<|assistant_end|>"]
    rows = [[*prompt, *tokenizer.encode(letter)[: LONGEST_LETTER - 1], end] for letter in letters]
    tokens, device = padded(rows), model.embed.weight.device
    targets = torch.full_like(tokens[:, 1:], IGNORE)
    for i, row in enumerate(rows):
        targets[i, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    return -model(tokens[:, :-1].to(device), targets.to(device), None, True).sum(1)


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    """Rows of a length, (B, longest); what is behind a row's end is `fill`."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
