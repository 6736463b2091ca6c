"""The residual stream between two half-blocks, with its pending additions; kernels/residual_norm explains them."""

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """The stream, and what is still to be done to it: λ·(x + y) + μ·start, or as much of it as is given."""

    x: Tensor  # (..., D)
    y: Tensor | None = None
    start: Tensor | None = None
    scale: Tensor | None = None  # λ, one number
    share: Tensor | None = None  # μ
    done: bool = False  # y is the settled stream already; its gradient is still that of what was added

    def settled(self) -> Tensor:
        assert not self.done
        x = self.x if self.y is None else self.x + self.y
        if self.start is None or self.scale is None or self.share is None:
            return x
        return self.scale.to(x.dtype) * x + self.share.to(x.dtype) * self.start

    def pending(self) -> bool:
        return self.y is not None or self.start is not None

    def flat(self) -> "Stream":
        y, start = (each if each is None else each.flatten(0, -2) for each in (self.y, self.start))
        return Stream(self.x.flatten(0, -2), y, start, self.scale, self.share, self.done)


class Mixing(NamedTuple):
    """What the next half-block does to the stream, beside adding to it."""

    start: Tensor | None = None  # (..., D)
    scale: Tensor | None = None  # λ and μ, rounded as everywhere, in fp32
    share: Tensor | None = None
