"""What a run is: frozen dataclasses, and `scale`, which derives all of them from one dial, the depth.

Depth fixes the width, the width and the vocabulary fix the number of parameters, parameters times a ratio
fix how many tokens to train on, tokens fix the batch, and the batch fixes the learning rates. Each derived
value can be set by hand, and then stays as set. Hardware never changes what is learned: it only chooses the
micro-batch, the dtype, the attention backend and the recipe (model/fast/recipe.py).

Every idea of the ladder is one field here, read by the plain model and by the fast paths that support it.
`dataclasses.replace(config, field=value)` is how a variant is made, and `to_dict`/`from_dict` how a run remembers what
it was.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nanorun.errors import UserError
from nanorun.json_files import has_type, shown, type_name

VOCAB_MULTIPLE = 64
REFERENCE_BATCH = 2**19  # tokens; the learning rates below were tuned at this batch size ...
REFERENCE_DEPTH = 12  # ... for a model of this depth
IGNORE = -1  # the target of a position that is not trained
# fp32's; named everywhere, since torch's default depends on dtype, device and version
NORM_EPSILON = 2.0**-23
MAX_WEIGHT_DECAY = 1.0  # the scaling rule was fitted to real models and diverges for tiny ones
DEFAULT_RATIO = 10.5  # tokens per scaling parameter; 8 is the speedrun, up to 12 is near the optimum
DEFAULT_PASSES = 8  # over the training text, at most, where no length is asked for
SHORT_RUN_TOKENS = 35_000_000  # below this, MIN_STEPS limits the batch size
MIN_STEPS = 700  # a batch size that leaves fewer steps is halved, where none is asked for
# Up to this width short runs have rules of their own (`_narrow_optim`, `regularized`), measured in docs/small-text.md.
NARROW = 256
NARROW_MAX_BATCH = 4096
NARROW_RUN_TOKENS = 10_000_000  # from here on learning rates fall with the length
FEW_PASSES = 3  # over the text, without dropout
VALUE_EMBEDDING_PASSES = 6  # more, and the tables of a narrow model memorize the text

Backend = Literal["auto", "plain", "sdpa", "cudnn", "flex", "flash"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class ModelConfig:
    depth: int
    dim: int
    heads: int
    kv_heads: int
    vocab_size: int  # of the tokenizer; the tables are padded to a multiple of 64
    context: int = 2048
    windows: str = "SSSL"  # tiled over the layers, the last is always long
    short_window: int | None = None  # None: a quarter of the context, rounded up to 128
    mlp_ratio: int = 4
    rope_base: float = 100_000.0
    qk_gain: float = 1.2  # on queries and keys, after their norm
    softcap: float = 15.0  # logits are 15·tanh(z/15)
    value_embeddings: bool = True  # on every other layer, the last always
    residual_scalars: bool = True  # x = λ·x + μ·x0 before each block
    smear: bool = True  # each embedding sees a little of the one before
    backout: bool = True  # subtract the middle of the stream before the last norm
    head_gate: bool = False  # each attention head's output times a gate computed from the first channels
    document_mask: bool = False  # attention stays inside documents, positions restart
    dropout: float = 0.0  # of embeddings and of the outputs of attention and MLP, in training

    def __post_init__(self) -> None:
        _check_ranges(self)
        if not self.windows or set(self.windows) - set("SL"):
            raise UserError(
                f"windows is {self.windows!r}: it is made of S (short) and L (long), such as SSSL."
            )
        if self.dim % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise UserError(
                f"{self.heads} heads and {self.kv_heads} kv heads do not divide a width of {self.dim} evenly."
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def fields_beyond(self, supported: Collection[str]) -> list[str]:
        """Fields that are not at their default and not among those that a path supports."""
        return [
            f.name for f in fields(self) if f.name not in supported and getattr(self, f.name) != f.default
        ]

    def window(self, layer: int) -> int:
        """How many positions back layer sees, itself included."""
        if layer == self.depth - 1 or self.windows[layer % len(self.windows)] == "L":
            return self.context
        short = self.short_window or -(-self.context // 4 // 128) * 128
        return min(short, self.context)

    @property
    def backout_layer(self) -> int:
        """The layer whose output backout subtracts. Not the last (of more than one): subtracting a share of the stream
        from itself changes only its length, which the norm undoes, or at a scale above 1 its sign."""
        return max(min(self.depth // 2, self.depth - 2), 0)

    def has_value_embedding(self, layer: int) -> bool:
        return self.value_embeddings and layer % 2 == (self.depth - 1) % 2

    def parameters(self) -> dict[str, int]:
        """Parameters by group, without building the model."""
        kv_dim = self.kv_heads * self.head_dim
        attention = 2 * self.dim * self.dim + 2 * self.dim * kv_dim
        embedded = sum(self.has_value_embedding(layer) for layer in range(self.depth))
        scalars = 2 * self.depth * self.residual_scalars + self.smear + self.backout
        gates = embedded * VALUE_GATE_CHANNELS * self.kv_heads + SMEAR_GATE_CHANNELS * self.smear
        gates += self.depth * HEAD_GATE_CHANNELS * self.heads * self.head_gate
        return {
            "matrices": self.depth * (attention + 2 * self.mlp_ratio * self.dim * self.dim),
            "head": self.padded_vocab * self.dim,
            "embedding": self.padded_vocab * self.dim,
            "value_embeddings": embedded * self.padded_vocab * kv_dim,
            "gates_and_scalars": gates + scalars,
        }

    @property
    def scaling_parameters(self) -> int:
        """What the number of tokens is measured against: matrices and head, no embeddings."""
        groups = self.parameters()
        return groups["matrices"] + groups["head"]

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters().values())

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 per matmul parameter, 12·heads·head_dim per key read by each layer."""
        keys = sum(min(self.window(layer), self.context) for layer in range(self.depth))
        return 6 * self.scaling_parameters + 12 * self.heads * self.head_dim * keys


VALUE_GATE_CHANNELS = 12
HEAD_GATE_CHANNELS = 12
SMEAR_GATE_CHANNELS = 24


@dataclass(frozen=True)
class OptimConfig:
    """Learning rates and weight decay at their peak, scaled to batch and width, and the rest of the optimizer."""

    matrix_lr: float = 0.02
    embedding_lr: float = 0.3
    value_embedding_lr: float = 0.15
    head_lr: float = 0.008
    lambda_lr: float = 0.005
    mu_lr: float = 0.05  # much more, and the residual stream cancels itself in the first steps
    gate_lr: float = 0.05  # smear, backout and value gates; the same limit holds
    matrix_weight_decay: float = 0.28
    orthogonalize: Literal["polar_express", "newton_schulz"] = "polar_express"
    normuon: bool = True
    cautious_decay: bool = True
    nesterov: bool = True
    beta2: float = 0.9  # of NorMuon's second moment
    max_grad_norm: float | None = None
    warmup_steps: int = 40
    warmdown: float = 0.65  # fraction of the run over which the learning rate falls
    final_lr_fraction: float = 0.05

    def __post_init__(self) -> None:
        _check_ranges(self)

    def learning_rates(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name.endswith("_lr")}

    def scaled(self, matrix: float, others: float) -> "OptimConfig":
        """The learning rate of matrices times one factor, all others times another."""
        lrs = {name: lr * others for name, lr in self.learning_rates().items()}
        return replace(self, **{**lrs, "matrix_lr": self.matrix_lr * matrix})

    def fine_tuning(self, lr_fraction: float, warmdown: float) -> "OptimConfig":
        """For a stage that starts from trained weights: every learning rate times `lr_fraction`, falling to 0. No
        weight decay, since the parent's schedule had reached 0."""
        return replace(
            self,
            **{name: lr * lr_fraction for name, lr in self.learning_rates().items()},
            final_lr_fraction=0.0,
            matrix_weight_decay=0.0,
            warmup_steps=0,
            warmdown=warmdown,
        )


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    batch_tokens: int = REFERENCE_BATCH
    minutes: float | None = None  # if asked for; steps follow from them and the speed of the machine
    seed: int = 0
    eval_every: int = 250
    eval_tokens: int = 20_000_000
    save_every: int = 500
    save_minutes: float = 30.0
    keep_checkpoints: int = 2
    packing: Literal["best_fit", "stream", "padded"] = "best_fit"
    reuse_tails: bool = True

    def __post_init__(self) -> None:
        _check_ranges(self)


# The values of numeric fields that make sense, first and last included.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("depth", "mlp_ratio"), (1, 1024)),
    **dict.fromkeys(("dim", "heads", "kv_heads"), (1, 2**17)),
    "vocab_size": (2, 2**20),
    "context": (2, 2**24),
    "short_window": (1, 2**24),
    "rope_base": (1.0, 1e12),
    "qk_gain": (1e-3, 1e6),
    "softcap": (0.0, 1e6),  # 0: none
    "dropout": (0.0, 0.99),
    **dict.fromkeys((f.name for f in fields(OptimConfig) if f.name.endswith("_lr")), (0.0, 1e3)),
    "matrix_weight_decay": (0.0, 1e3),
    **dict.fromkeys(("beta2", "warmdown", "final_lr_fraction"), (0.0, 1.0)),
    "max_grad_norm": (1e-9, 1e9),
    **dict.fromkeys(("warmup_steps", "eval_every"), (0, 10**9)),
    **dict.fromkeys(("steps", "save_every", "keep_checkpoints"), (1, 10**9)),
    **dict.fromkeys(("batch_tokens", "eval_tokens"), (1, 10**12)),
    "minutes": (1e-6, 1e9),
    "save_minutes": (0.0, 1e9),
    "seed": (0, 2**63 - 1),
}


def _check_ranges(part: ModelConfig | OptimConfig | TrainConfig) -> None:
    for name, value in vars(part).items():
        low, high = _RANGES.get(name, (None, None))
        if low is not None and high is not None and value is not None and not low <= value <= high:
            limits = f"{low:,} to {high:,}" if isinstance(low, int) else f"{low:g} to {high:g}"
            raise UserError(f"{name} is {value}: it must be from {limits}.")


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    data: str = "sample"
    tokenizer: str = "sample"
    kind: Literal["base", "sft", "rl"] = "base"

    @property
    def tokens(self) -> int:
        return self.train.steps * self.train.batch_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Config":
        names = [f.name for f in fields(Config)]  # a run's config.json has others, of its stage
        missing = [name for name in names if not isinstance(record, Mapping) or name not in record]
        if missing:
            raise UserError(
                f"This is not a configuration of nanorun, it has no {_listed(missing)}: use a run's config.json."
            )
        config: Config = _build("", Config, {name: record[name] for name in names})
        return config


# Implementation choices, which earlier versions stored as part of the model. Checkpoints record them now
# (model/fast/recipe.py).
_RECIPE_FIELDS = frozenset(
    "recompute fused_qkv fused_rope pingpong fused_relu2 fused_residual fused_stream fused_loss sparse_tables "
    "cast_once fp8".split()
)


# Fields of config.json that earlier versions wrote under another name, besides matrix_rate for matrix_lr etc.
_RENAMED_FIELDS = {
    "final_rate": "final_lr_fraction",
    "matrix_decay": "matrix_weight_decay",
    "clip": "max_grad_norm",
}


def _build(part: str, kind: type, record: Any) -> Any:
    if not isinstance(record, Mapping):
        raise UserError(f"The configuration's {part} is {shown(record)}: it must hold settings by name.")
    record = {
        _RENAMED_FIELDS.get(name, re.sub("_rate$", "_lr", name)): value
        for name, value in record.items()
        if name not in _RECIPE_FIELDS
    }
    hints = get_type_hints(kind)
    unknown = sorted(str(name) for name in set(record) - set(hints))
    if unknown:
        raise UserError(f"The configuration has fields this nanorun does not know: {', '.join(unknown)}.")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in record]
    if missing:
        raise UserError(f"The configuration's {part} has no {_listed(missing)}: use a run's config.json.")
    for name, value in record.items():
        if is_dataclass(hints[name]):
            record[name] = _build(name, hints[name], value)
        else:
            check_field(name, value, hints[name])
    return kind(**record)


def check_field(name: str, value: Any, hint: Any) -> None:
    """Raises if a value from JSON does not have the field's type."""
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            choices = ", ".join(get_args(hint))
            raise UserError(f"The configuration's {name} is {shown(value)}: choose among {choices}.")
        return
    kinds = get_args(hint) or (hint,)  # two of them for `int | None`
    if value is None and type(None) in kinds:
        return
    expected = next(kind for kind in kinds if kind is not type(None))
    if not has_type(value, expected):
        raise UserError(f"The configuration's {name} is {shown(value)}: it must be {type_name(expected)}.")


def _listed(names: Sequence[str]) -> str:
    return " and no ".join([", no ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True)
class Horizon:
    """The length of a run: one of these, or none for the default ratio."""

    ratio: float | None = None
    tokens: int | None = None
    flops: float | None = None
    steps: int | None = None
    minutes: float | None = None  # on this machine: plan/dial.py turns them into tokens

    def __post_init__(self) -> None:
        names = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(names) > 1:
            raise UserError(f"Give one of --{', --'.join(names)}: each fixes the length of the run.")
        if any(not 0 < getattr(self, name) < math.inf for name in names):
            raise UserError(f"--{names[0]} must be a number more than 0.")


def largest_divisor(total: int, at_most: int) -> int:
    """The largest divisor of `total` up to `at_most`, so that a step is whole micro-batches."""
    return next(n for n in range(min(at_most, total), 0, -1) if total % n == 0)


def scale_model(depth: int, vocab_size: int, context: int = 2048, **changes: Any) -> ModelConfig:
    """The shape of a model of this depth."""
    dim = -(-depth * 64 // 128) * 128
    head_dim = 32 if depth <= 4 else 128  # one wide head cannot copy
    shape = {"dim": dim, "heads": max(dim // head_dim, 1), "kv_heads": max(dim // head_dim, 1)}
    return ModelConfig(depth=depth, vocab_size=vocab_size, context=context, **{**shape, **changes})


def scale(
    depth: int,
    vocab_size: int,
    *,
    context: int = 2048,
    horizon: Horizon | None = None,
    batch_tokens: int | None = None,
    text_tokens: int | None = None,
    data: str = "sample",
    tokenizer: str = "sample",
) -> Config:
    """The whole configuration, derived from the depth."""
    model = scale_model(depth, vocab_size, context)
    return scale_training(
        model,
        horizon or Horizon(),
        batch_tokens=batch_tokens,
        text_tokens=text_tokens,
        data=data,
        tokenizer=tokenizer,
    )


def regularized(model: ModelConfig, passes: float) -> ModelConfig:
    """A narrow model that reads its text often memorizes it: dropout slows that down, and so does one without value
    embeddings. (Wider models keep to what the fast path supports.)"""
    if model.dim > NARROW or passes <= FEW_PASSES:
        return model
    dropout = min(0.1 * math.log2(passes / FEW_PASSES), 0.3)
    embeddings = model.value_embeddings and passes <= VALUE_EMBEDDING_PASSES
    return replace(model, dropout=round(dropout, 2), value_embeddings=embeddings)


def _narrow_optim(tokens: float, passes: float) -> OptimConfig:
    """Learning rates and weight decay of a narrow model. All but the matrices learn more slowly where text repeats."""
    by_length = min(math.sqrt(NARROW_RUN_TOKENS / tokens), 1.0)
    by_passes = min(max(max(passes - 0.5, 1.0) ** -0.6, 0.25), 1.0)
    return replace(OptimConfig().scaled(2 * by_length, by_length * by_passes), matrix_weight_decay=0.3)


def scale_training(
    model: ModelConfig,
    horizon: Horizon,
    *,
    batch_tokens: int | None = None,
    text_tokens: int | None = None,
    data: str = "sample",
    tokenizer: str = "sample",
) -> Config:
    """Length, batch size and learning rates for a model. `text_tokens` is the size of the training text: a length that
    nobody asked for is at most DEFAULT_PASSES times that."""
    context = model.context
    reference = scale_model(REFERENCE_DEPTH, model.vocab_size, context)
    ratio = horizon.ratio or DEFAULT_RATIO
    tokens = ratio * model.scaling_parameters
    if horizon.tokens is not None:
        tokens = horizon.tokens
    elif horizon.flops is not None:
        tokens = horizon.flops / model.flops_per_token
    elif horizon == Horizon() and text_tokens is not None:
        tokens = min(tokens, DEFAULT_PASSES * text_tokens)
    data_ratio = tokens / (ratio * reference.scaling_parameters)  # to the reference model's tokens
    if batch_tokens is None:
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH * data_ratio**0.383))
        batch_tokens = min(batch_tokens, 2 ** math.floor(math.log2(max(tokens / MIN_STEPS, 1))))
        if model.dim <= NARROW and tokens < SHORT_RUN_TOKENS:
            batch_tokens = min(batch_tokens, NARROW_MAX_BATCH)
        batch_tokens = max(batch_tokens, context)
    if batch_tokens < context:
        raise UserError(
            f"A step of {batch_tokens:,} tokens is less than one row of {context:,}: use a larger --batch-tokens "
            "or a smaller --context."
        )
    batch_tokens = batch_tokens // context * context
    steps = horizon.steps or max(round(tokens / batch_tokens), 1)

    tokens = steps * batch_tokens
    if model.dim <= NARROW and tokens < SHORT_RUN_TOKENS:
        passes = tokens / text_tokens if text_tokens else 1.0
        model, optim = regularized(model, passes), _narrow_optim(tokens, passes)
    else:
        lr_scale = math.sqrt(batch_tokens / REFERENCE_BATCH)
        data_ratio = tokens / (ratio * reference.scaling_parameters)
        weight_decay = OptimConfig.matrix_weight_decay * lr_scale / data_ratio
        if tokens < SHORT_RUN_TOKENS:
            # A short run can take larger steps: with its default batch, learning rates are ∝ 1/√tokens.
            lr_scale = min(lr_scale * SHORT_RUN_TOKENS / tokens, 1.0)
        # Muon's updates need no scaling by width.
        optim = OptimConfig().scaled(lr_scale, lr_scale * (model.dim / 768) ** -0.5)
        optim = replace(optim, matrix_weight_decay=min(weight_decay, MAX_WEIGHT_DECAY))
    optim = replace(optim, warmup_steps=min(optim.warmup_steps, max(steps // 10, 1)))
    train = TrainConfig(steps=steps, batch_tokens=batch_tokens)
    return Config(model, optim, train, data, tokenizer)


def sample_preset(
    vocab_size: int, data: str = "sample", tokenizer: str = "sample", steps: int = 400
) -> Config:
    """The CPU speedrun: a model that learns the sample world in about three minutes on two cores.

    Too small for the scaling rules: four narrow heads, a short context, a small batch and unscaled learning rates were
    found by trial (docs/lab-notebook.md).
    """
    model = scale_model(4, vocab_size, context=256, dim=128, heads=4, kv_heads=4)
    optim = replace(OptimConfig(), matrix_weight_decay=0.1, warmup_steps=10)
    train = TrainConfig(
        steps=steps, batch_tokens=4096, eval_every=200, eval_tokens=150_000, save_every=50, save_minutes=1.0
    )
    return Config(model, optim, train, data, tokenizer)
