"""From a text and some minutes to the whole configuration: `train base --minutes`, and `nanorun make`.

`config.scale` derives everything from a depth, and assumes that there is enough text and time for a model of that
depth. With your own text on a laptop neither holds, so here everything follows from these two:

    vocabulary   grows with the square root of the text (`vocabulary.size_for`)
    model        the largest of SHAPES that still sees TOKENS_PER_PARAMETER tokens per parameter in the time
    context      short rows in a short run
    length       all of the time, but at most MAX_PASSES over the text
    the rest     batch size, learning rates, weight decay and dropout follow from the length and from how often it reads
                 the text (`config.scale_training`)
    evaluation   EVALUATIONS times, in a small share of the time

The speed of a shape is measured on this machine, or estimated for a GPU (speed.py). The constants were fitted to some
two hundred runs (docs/small-text.md); benchmarks/small_text.py compares the choices with the best of a search.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from nanorun.config import (
    NARROW,
    Config,
    Horizon,
    ModelConfig,
    TrainConfig,
    scale,
    scale_model,
    scale_training,
)
from nanorun.console import count
from nanorun.data.dataset import Dataset, Split, dataset_names, open_dataset
from nanorun.data.shards import read_texts
from nanorun.data.vocabulary import LARGEST_VOCABULARY, tokenizer_for
from nanorun.errors import UserError
from nanorun.hardware import Gpu, named_gpu, this_gpu
from nanorun.plan.estimate import TrainingPlan, make_plan
from nanorun.text.store import open_tokenizer, tokenizer_names
from nanorun.text.tokenizer import Tokenizer

# Depth and width, by the time that a token takes. From 12 layers on the width is that of `scale_model`.
SHAPES = (
    (2, 64),
    (2, 128),
    (4, 128),
    (4, 192),
    (6, 192),
    (6, 256),
    (6, 384),
    (8, 512),
    (10, 640),
    *((depth, 64 * depth) for depth in range(12, 34, 2)),
)
TOKENS_PER_PARAMETER = 2.0
LONG_ROWS_TOKENS = 4_000_000  # a narrow model has rows of 512 tokens from here on, of 256 below
MAX_PASSES = 40
MANY_PASSES = 4  # from here on the user is told
DEFAULT_MINUTES = 10.0  # on a CPU, if neither depth nor length is given
DEFAULT_DEPTH = 12
EVALUATIONS = 8
EVALUATION_SHARE = 0.05  # of the time


@dataclass(frozen=True)
class TextSize:
    """How much text there is, in tokens of the tokenizer that the model uses."""

    train_tokens: int
    val_tokens: int


def text_size(dataset: Dataset, tokenizer: Tokenizer) -> TextSize:
    return TextSize(split_tokens(dataset, tokenizer, "train"), split_tokens(dataset, tokenizer, "val"))


def split_tokens(dataset: Dataset, tokenizer: Tokenizer, split: Split) -> int:
    """About how many tokens a split has."""
    if dataset.kind == "bin":
        return dataset.total("tokens", split)
    some = "\n".join(islice(read_texts(dataset, split), 100))[:100_000]
    tokens_per_byte = len(tokenizer.encode(some)) / max(len(some.encode()), 1)
    return max(round(dataset.total("text_bytes", split) * tokens_per_byte), 1)


def shape(depth: int, dim: int, vocab_size: int, context: int | None = None) -> ModelConfig:
    """A model of SHAPES. Small models have narrow heads, since a single wide one cannot copy, and short rows."""
    if depth >= DEFAULT_DEPTH:
        return scale_model(depth, vocab_size, context or 2048)
    heads = dim // 32 if dim <= 256 else dim // 64
    context = context or (256 if dim <= NARROW else 512 if dim <= 384 else 1024)
    return scale_model(depth, vocab_size, context, dim=dim, heads=heads, kv_heads=heads)


def configure_here(
    depth: int | None,
    horizon: Horizon,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    context: int | None = None,
    batch_tokens: int | None = None,
    gpu: Gpu | None = None,
) -> Config:
    """The configuration on a dataset of this home, with its own tokenizer unless another is named."""
    dataset = open_dataset(data)
    text = open_tokenizer(tokenizer) if tokenizer is not None else tokenizer_for(dataset)
    size = text_size(dataset, text)
    config = configure(
        depth, size, text.vocab_size, horizon, gpu=gpu, context=context, batch_tokens=batch_tokens
    )
    return replace(config, data=dataset.name, tokenizer=text.name)


def plan_here(
    depth: int | None,
    vocab_size: int | None,
    horizon: Horizon,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    context: int | None = None,
    batch_tokens: int | None = None,
    gpu: str | None = None,
    gpus: int = 1,
    device_batch: int | None = None,
) -> TrainingPlan:
    """The plan of what `train base` would do here. Without data, or with a vocabulary of its own, that of a run with
    enough text."""
    device = named_gpu(gpu) if gpu is not None else this_gpu()
    validation_tokens = None
    if vocab_size is None and dataset_names() and (tokenizer is not None or tokenizer_names()):
        config = configure_here(
            depth,
            default_horizon(depth, horizon, device.device),
            data=data,
            tokenizer=tokenizer,
            context=context,
            batch_tokens=batch_tokens,
            gpu=device,
        )
        validation_tokens = split_tokens(open_dataset(config.data), open_tokenizer(config.tokenizer), "val")
        source = f"of the tokenizer '{config.tokenizer}'; the text is '{config.data}'"
    elif horizon.minutes is not None:
        raise UserError(
            "--minutes needs text to plan for: add some with nanorun data add, train a tokenizer with nanorun tok "
            "train, and leave out --vocab."
        )
    else:
        source = "as specified" if vocab_size is not None else "the default size"
        config = scale(
            depth or DEFAULT_DEPTH,
            vocab_size or LARGEST_VOCABULARY,
            context=context or 2048,
            horizon=horizon,
            batch_tokens=batch_tokens,
        )
    plan = make_plan(config, device, gpus, device_batch, validation_tokens=validation_tokens)
    return replace(plan, vocab_from=source)


def default_horizon(depth: int | None, horizon: Horizon, device: str) -> Horizon:
    """On a CPU, without a depth and a length, ten minutes."""
    if depth is None and horizon == Horizon() and device == "cpu":
        return Horizon(minutes=DEFAULT_MINUTES)
    return horizon


def configure(
    depth: int | None,
    text: TextSize,
    vocab_size: int,
    horizon: Horizon,
    *,
    gpu: Gpu | None = None,
    context: int | None = None,
    batch_tokens: int | None = None,
    tokens_per_s: Callable[[Config], float] | None = None,
) -> Config:
    """The configuration of a run on this text. With `horizon.minutes`, the one that learns most from it in the time; of
    this depth, where one is given."""

    def with_tokens(model: ModelConfig, tokens: int) -> Config:
        length = Horizon(tokens=max(tokens, 1))
        return scale_training(model, length, batch_tokens=batch_tokens, text_tokens=text.train_tokens)

    def tokens_in_time(model: ModelConfig, about: int | None = None) -> int:
        """`about` so many: the batch size, and with it the speed, depends on the length."""
        assert horizon.minutes is not None
        draft = with_tokens(model, about or round(TOKENS_PER_PARAMETER * model.scaling_parameters))
        speed = tokens_per_s(draft) if tokens_per_s is not None else make_plan(draft, gpu).tokens_per_s
        return round(60 * horizon.minutes * (1 - EVALUATION_SHARE) * speed)

    if horizon.minutes is None:
        config = scale(
            depth or DEFAULT_DEPTH,
            vocab_size,
            context=context or 2048,
            horizon=horizon,
            batch_tokens=batch_tokens,
            text_tokens=text.train_tokens,
        )
    elif depth is not None:
        model = scale_model(depth, vocab_size, context or 2048)
        config = with_tokens(model, tokens_in_time(model))
    else:
        models = (shape(*each, vocab_size, context) for each in SHAPES)
        chosen = next(models)
        tokens = tokens_in_time(chosen)
        for model in models:
            more = tokens_in_time(model)
            if more < TOKENS_PER_PARAMETER * model.scaling_parameters:
                break
            chosen, tokens = model, more
        if context is None and chosen.dim <= NARROW and tokens >= LONG_ROWS_TOKENS:
            chosen = replace(chosen, context=2 * chosen.context)
        tokens = tokens_in_time(chosen, tokens)
        config = with_tokens(chosen, min(tokens, MAX_PASSES * text.train_tokens))
    return replace(config, train=_evaluated(config, text.val_tokens, horizon.minutes))


def _evaluated(config: Config, val_tokens: int, minutes: float | None) -> TrainConfig:
    """Enough evaluations for a curve, in a small share of the time; with `minutes`, of less text if they must be. A
    forward pass takes a third of the time of a step."""
    train = config.train
    affordable = 3 * EVALUATION_SHARE * config.tokens
    times = int(min(max(affordable / val_tokens, 1), EVALUATIONS))
    if minutes is None:
        return replace(train, eval_every=min(train.eval_every, -(-train.steps // times)))
    times = max(times, EVALUATIONS // 2)
    return replace(
        train,
        eval_every=-(-train.steps // times),
        eval_tokens=max(min(val_tokens, train.eval_tokens, int(affordable / times)), config.model.context),
        minutes=minutes,
        save_minutes=min(train.save_minutes, max(minutes / 10, 1.0)),
    )


def passes_sentence(config: Config, train_tokens: int) -> str:
    """How often the run reads the text, if that is often."""
    passes = config.tokens / train_tokens
    if passes <= MANY_PASSES:
        return ""
    return (
        f"this is {passes:.3g} passes over {count(train_tokens)} tokens of text: from about {MANY_PASSES} on a model "
        "learns less from each, and memorizes more; more text would help most"
    )
