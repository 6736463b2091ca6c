"""Models that break: the loss is NaN in chosen calls, or a weight that no step uses becomes NaN."""

import torch


def poison(step, at):
    """The step function, but the last embedding, which no token uses, holds a NaN after the chosen calls."""
    calls = 0

    def poisoned(t, **more):
        nonlocal calls
        calls += 1
        done = step(t, **more)
        if calls in at:
            with torch.no_grad():
                t.model.embed.weight[-1, 3] = float("nan")
        return done

    return poisoned


class Spike:
    """The model, but its loss is NaN in the given calls."""

    def __init__(self, forward, bad: set[int]) -> None:
        self.forward, self.bad, self.calls = forward, bad, 0

    def __call__(self, *args):
        self.calls += 1
        loss = self.forward(*args)
        return loss * float("nan") if self.calls in self.bad else loss
