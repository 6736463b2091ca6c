"""Generation as the definition says: the whole forward pass again for every token.

Slow, and the truth that any faster way is compared with. Samples during training use it, where a few dozen
tokens are wanted and nothing depends on speed.
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
    """What the model says after each prompt, without the stop token. Temperature 0 takes the likeliest.

    Each prompt draws from its own generator, so a sample does not depend on which others are asked for.
    """
    replies = []
    for number, prompt in enumerate(prompts):
        dice = torch.Generator().manual_seed(seed + number)
        tokens = list(prompt)
        for _ in range(max_tokens):
            context = torch.tensor([tokens[-model.config.context :]], device=model.embed.weight.device)
            logits = model.logits(context)[0, -1].cpu()
            token = _draw(logits, temperature, top_k, dice)
            if token in stop:
                break
            tokens.append(token)
        replies.append(tokens[len(prompt) :])
    return replies


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, dice: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice))
