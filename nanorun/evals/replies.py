"""A model's replies to many questions at once: generated text, or the most likely letter of a multiple choice.

A question with letters (multiple choice) needs no generation: one forward pass over a batch of prompts, and the
letter whose token is most likely to come next. A letter can have several tokens in a vocabulary ("A", " A"),
whose probabilities are summed; where it is no single token, whole answers are compared instead. Every other
question goes to the engine, which generates many replies at a time and runs the calculator.

A reply's prompt and random draws depend on its question alone: each question has its own seed, derived from its
task and index. In fp32 the replies therefore depend on neither the batch size nor the other questions.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nanorun.config import IGNORE, ModelConfig
from nanorun.infer.engine import Engine, Request, Sampling, Settings
from nanorun.model.gpt import GPT
from nanorun.tasks.task import Conversation, Task, question_messages
from nanorun.text.chat import Part, parse_reply, render_prompt
from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.calls import ToolState

KV_CACHE_SHARE = 0.15  # of a GPU's memory
KV_CACHE_BYTES_CPU = 2 * 2**30
MAX_LETTER_TOKENS = 16  # room in the context for the answer to a multiple choice


@dataclass(frozen=True)
class ReplySettings:
    max_tokens: int = 512
    temperature: float = 0.0  # 0: greedy
    samples: int = 1  # replies per question
    seed: int = 0
    batch: int = 64  # questions at a time


@dataclass(frozen=True)
class GradedReply:
    """A line of the file of replies."""

    task: str
    index: int  # of the question in its task
    sample: int
    question: str
    reply: list[Part]
    finish: str  # stop, length, or letter
    reward: float | None = None  # None: not graded


def generate_replies(
    model: GPT,
    tokenizer: Tokenizer,
    name: str,
    task: Task,
    indices: Sequence[int],
    settings: ReplySettings,
    on_reply: Callable[[], None] = lambda: None,
) -> list[GradedReply]:
    """All replies to these questions of a task, in their order, not graded yet."""
    if task.letters is not None:
        context, letters = model.config.context, [letters_of(task, i) for i in indices]
        prompts = [question_prompt(task[i], tokenizer, context, MAX_LETTER_TOKENS) for i in indices]
        chosen = choose_letters(model, tokenizer, prompts, letters, settings.batch, on_reply)
        return [
            GradedReply(name, i, 0, question_text(task[i]), [{"type": "text", "text": letter}], "letter")
            for i, letter in zip(indices, chosen, strict=True)
        ]
    slots = max_slots(model.config, model.embed.weight.device, settings.batch, model.dtype.itemsize)
    requests = [
        reply_request(
            question_prompt(task[i], tokenizer, model.config.context, settings.max_tokens),
            tokenizer,
            Sampling(temperature=settings.temperature, seed=derive_seed(settings.seed, name, i)),
            settings.max_tokens,
            settings.samples if settings.temperature else 1,
        )
        for i in indices
    ]
    with Engine(model, tokenizer, Settings(slots=slots, tool_threads=0)) as engine:
        replies = engine.generate(requests, on_reply)
    numbered = [(i, n) for i, request in zip(indices, requests, strict=True) for n in range(request.samples)]
    return [
        GradedReply(name, i, n, question_text(task[i]), parse_reply(reply.ids, tokenizer), reply.finish)
        for (i, n), reply in zip(numbered, replies, strict=True)
    ]


def question_prompt(
    conversation: Conversation, tokenizer: Tokenizer, context: int, max_tokens: int
) -> list[int]:
    """The question as tokens, truncated from the left to leave room for the reply in the context."""
    ids = render_prompt(question_messages(conversation), tokenizer)
    limit = context - min(max_tokens, context // 2)
    return ids if len(ids) <= limit else [tokenizer.bos, *ids[len(ids) - limit + 1 :]]


def reply_request(
    prompt: list[int],
    tokenizer: Tokenizer,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    logprobs: int | None = None,
) -> Request:
    """Any special token that starts another message ends a reply; those of a tool call do not."""
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


def derive_seed(*parts: object) -> int:
    """A seed that is a hash of the parts; the top three bits are free for the seeds of a request's samples."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 3


def question_text(conversation: Conversation) -> str:
    """A question as plain text."""
    messages = question_messages(conversation)
    contents = [message["content"] for message in messages]
    texts = [c if isinstance(c, str) else "".join(part["text"] for part in c) for c in contents]
    if len(messages) == 1:
        return texts[0]
    return "\n\n".join(f"{m['role']}: {text}" for m, text in zip(messages, texts, strict=True))


def max_slots(config: ModelConfig, device: torch.device, requested: int, itemsize: int) -> int:
    """The engine's slots: as many as requested, if their KV cache fits its share of memory."""
    slot_bytes = 2 * config.depth * config.kv_heads * config.head_dim * config.context * itemsize
    limit = float(KV_CACHE_BYTES_CPU)
    if device.type == "cuda":
        limit = KV_CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory
    return max(min(requested, int(limit / slot_bytes)), 1)


# -- multiple choice ---------------------------------------------------------------------------------


def letters_of(task: Task, index: int) -> Sequence[str]:
    """A task whose questions differ in their number of choices implements `letters_of(index)`."""
    method: Any = getattr(task, "letters_of", None)
    letters: Sequence[str] = method(index) if method is not None else (task.letters or ())
    return letters


@torch.no_grad()
def choose_letters(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    letters: Sequence[Sequence[str]],
    batch: int = 64,
    on_reply: Callable[[], None] = lambda: None,
) -> list[str]:
    """The most likely of its letters for each prompt. Prompts of similar length share a batch: little padding."""
    chosen = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for start in range(0, len(prompts), batch):
        part = by_length[start : start + batch]
        for n, logits in zip(part, _next_logits(model, [prompts[n] for n in part]), strict=True):
            tokens = [_letter_tokens(tokenizer, letter) for letter in letters[n]]
            if all(tokens) and len({ids[0] for ids in tokens}) == len(tokens):
                scores = torch.stack([logits[ids].logsumexp(0) for ids in tokens])
            else:
                scores = _answer_logprobs(model, tokenizer, prompts[n], letters[n])
            chosen[n] = letters[n][int(scores.argmax())]
            on_reply()
    return chosen


def _letter_tokens(tokenizer: Tokenizer, letter: str) -> list[int]:
    """The tokens that are this letter, without a leading space first; none if the letter is no single token."""
    encodings = [tokenizer.encode(text) for text in (letter, f" {letter}")]
    if len(encodings[0]) != 1:
        return []
    return list(dict.fromkeys(ids[0] for ids in encodings if len(ids) == 1))


def _next_logits(model: GPT, rows: Sequence[Sequence[int]]) -> Tensor:
    """fp32 logits (B, vocabulary) after the last token of each row. Attention is causal: it never sees padding."""
    device = model.embed.weight.device
    ends = torch.tensor([len(row) - 1 for row in rows], device=device)
    hidden = model.hidden(pad_rows(rows).to(device))
    return model.logits_of(hidden[torch.arange(len(rows), device=device), ends])


def _answer_logprobs(
    model: GPT, tokenizer: Tokenizer, prompt: Sequence[int], letters: Sequence[str]
) -> Tensor:
    """The log-probability of each letter followed by the end of the answer."""
    end = tokenizer.special["<|assistant_end|>"]
    rows = [[*prompt, *tokenizer.encode(letter)[: MAX_LETTER_TOKENS - 1], end] for letter in letters]
    tokens, device = pad_rows(rows), model.embed.weight.device
    targets = torch.full_like(tokens[:, 1:], IGNORE)
    for i, row in enumerate(rows):
        targets[i, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    losses: Tensor = model(tokens[:, :-1].to(device), targets.to(device), None, True)
    return -losses.sum(1)


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows padded on the right with zeros to one length, (B, longest)."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
