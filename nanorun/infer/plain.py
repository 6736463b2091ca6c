"""Reference generation: a full forward pass for every token, without a cache.

Slow, and the reference for every faster way. Training uses it for samples, where a few dozen tokens are needed and
speed does not matter.
"""

from collections.abc import Sequence

import torch

from nanorun.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = 50,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """The continuation of each prompt, without the stop token. Temperature 0 is greedy.

    Each prompt has its own random generator, so a sample does not depend on the other prompts.
    """
    replies = []
    for i, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed + i)
        tokens = list(prompt)
        for _ in range(max_tokens):
            context = torch.tensor([tokens[-model.config.context :]], device=model.embed.weight.device)
            logits = model.logits(context)[0, -1].cpu()
            token = _sample(logits, temperature, top_k, generator)
            if token in stop:
                break
            tokens.append(token)
        replies.append(tokens[len(prompt) :])
    return replies


def _sample(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
