"""How a model is computed while it trains: FP8 matmuls, fused kernels, recomputed activations.

A recipe changes rounding, speed and memory, never the function: the configuration alone says what is learned. So it
is no part of a run's identity. `resolve` turns what is wanted into what this device supports; each checkpoint
records the resolved recipe, and a resumed run reuses it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_type_hints

import torch

from nanorun.config import ModelConfig, check_field
from nanorun.errors import UserError

# Cumulative. mlp: the MLP's matmuls; layers: queries, keys and values too; head: the gradients of the head too; all:
# the logits too. auto: all, on a GPU and at a width where that was measured to pay.
Fp8 = Literal["auto", "none", "mlp", "layers", "head", "all"]

RENAMED = {"sparse_tables": "inplace_embedding_grads"}  # by the name in older checkpoints
FP8_LEAST_DIM = 768  # narrower models were not measured to gain from FP8


@dataclass(frozen=True)
class Recipe:
    fp8: Fp8 = "auto"  # which matmuls run in FP8
    fused_rope: bool = True  # one kernel for rotary embeddings and QK-norm; FP8 layers require it
    fused_loss: bool = True  # one kernel from logits to loss and gradient; an FP8 head requires it
    fused_add_norm: bool = True  # FP8 layers: residual additions happen in the next norm kernel
    fused_relu2: bool = True  # FP8 MLP on Hopper: ReLU² in the epilogue of the up projection
    fused_residual: bool = True  # FP8 layers on Hopper: residual additions in GEMM epilogues
    pingpong: bool = True  # FP8 on Hopper: GEMMs whose epilogues overlap with the next tile's main loop
    inplace_embedding_grads: bool = True  # gradients of embedding tables accumulate row by row, in place
    recompute: bool = False  # activations of a block are recomputed in the backward pass (any device)

    @property
    def fp8_mlp(self) -> bool:
        return self.fp8 in ("mlp", "layers", "head", "all")

    @property
    def fp8_layers(self) -> bool:
        return self.fp8 in ("layers", "head", "all")

    @property
    def fp8_head(self) -> bool:
        return self.fp8 in ("head", "all")

    @property
    def is_plain(self) -> bool:
        """Whether the plain model computes all of it."""
        return self.fp8 == "none" and not (self.fused_rope or self.fused_loss or self.inplace_embedding_grads)

    @property
    def uses_quack(self) -> bool:
        return self.fp8 != "none" and (self.pingpong or self.fused_relu2 or self.fused_residual)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Recipe":
        """A recorded recipe; fields that this version does not know are dropped, those it lacks are defaults."""
        known = get_type_hints(Recipe)
        values = {name: value for name, value in current_names(record).items() if name in known}
        for name, value in values.items():
            check_field(name, value, known[name])
        return Recipe(**values)


def current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded recipe with the fields that were renamed since under their new names."""
    return {RENAMED.get(name, name): value for name, value in record.items()}


DEFAULT_RECIPE = Recipe()
PLAIN_RECIPE = Recipe(
    fp8="none",
    fused_rope=False,
    fused_loss=False,
    fused_add_norm=False,
    fused_relu2=False,
    fused_residual=False,
    pingpong=False,
    inplace_embedding_grads=False,
)


def resolve(
    recipe: Recipe, config: ModelConfig, device: torch.device, dtype: torch.dtype, strict: bool = True
) -> Recipe:
    """The recipe as this device runs it: what it does not support is switched off. With `strict`, FP8 that is asked
    for by name must be possible."""
    from nanorun.model.kernels import fp8, gemm, kernels_run_on

    fp8_possible = fp8.is_supported(device) and dtype == torch.bfloat16 and fp8.is_aligned(config.dim)
    if recipe.fp8 == "auto":
        recipe = replace(recipe, fp8=default_fp8(config, fp8_possible and fp8.on_by_default(device)))
    elif recipe.fp8 != "none" and not fp8_possible and not strict:
        recipe = replace(recipe, fp8="none")
    elif recipe.fp8 != "none" and not fp8_possible:
        raise UserError(
            f"fp8 is '{recipe.fp8}', but FP8 matmuls need an Ada, Hopper or newer GPU with Triton, bf16 and a width "
            "that is a multiple of 16: train with --fp8 none here."
        )
    if not kernels_run_on(device):
        return replace(PLAIN_RECIPE, recompute=recipe.recompute)
    if recipe.uses_quack and not gemm.is_supported(device):
        recipe = replace(recipe, pingpong=False, fused_relu2=False, fused_residual=False)
    return consistent(recipe)


def default_fp8(config: ModelConfig, pays: bool) -> Fp8:
    """What `auto` is on a device where FP8 was measured to pay, or not (docs/speed.md)."""
    return "all" if pays and config.dim >= FP8_LEAST_DIM and config.dim % 16 == 0 else "none"


def consistent(recipe: Recipe) -> Recipe:
    """Switches off what has no effect without another field, so that equal recipes compare equal."""
    fp8 = recipe.fp8
    if recipe.fp8_head and not recipe.fused_loss:
        fp8 = "layers"
    if fp8 in ("layers", "head", "all") and not recipe.fused_rope:
        fp8 = "mlp"
    recipe = replace(recipe, fp8=fp8)
    add_norm = recipe.fused_add_norm and recipe.fp8_mlp
    return replace(
        recipe,
        fused_add_norm=add_norm,
        fused_relu2=recipe.fused_relu2 and recipe.fp8_mlp,
        fused_residual=recipe.fused_residual and recipe.fp8_layers and add_norm,
        pingpong=recipe.pingpong and recipe.fp8 != "none",
    )
