"""Every field of ModelConfig against every path: the path computes what the plain model computes, or rejects the field
by name.

A new field needs one line in `CHANGES`, and with it a decision of each path: `unsupported` of the fast training path
and of the fast decode step reject a field that is not in their `SUPPORTED_FIELDS`.
"""

from dataclasses import fields, replace

import pytest
import torch
from near import relative_error

from nanorun.config import ModelConfig, scale_model
from nanorun.infer.cache import Cache
from nanorun.infer.forward import decode, prefill
from nanorun.infer.kernels import decode as fast_decode
from nanorun.infer.model import inference_copy
from nanorun.model.fast import path
from nanorun.model.fast.recipe import Recipe, consistent
from nanorun.model.gpt import GPT
from nanorun.model.loss import plain_loss

pytest.importorskip("triton", reason="Triton is not installed")

CPU = torch.device("cpu")
SMALL = scale_model(3, 90, context=40, dim=64, heads=2, kv_heads=2, windows="SL", short_window=16)
# By field: changes that set it to another value (with what must change along), each tried by itself.
CHANGES: dict[str, list[dict[str, object]]] = {
    "depth": [{"depth": 4}],
    "dim": [{"dim": 128}, {"dim": 96}],  # heads of 48 channels, too
    "heads": [{"heads": 4}],
    "kv_heads": [{"kv_heads": 1}],
    "vocab_size": [{"vocab_size": 64}],
    "context": [{"context": 33}],
    "windows": [{"windows": "L"}],
    "short_window": [{"short_window": 5}],
    "mlp_ratio": [{"mlp_ratio": 2}],
    "rope_base": [{"rope_base": 500.0}],
    "qk_gain": [{"qk_gain": 0.7}],
    "softcap": [{"softcap": 4.0}, {"softcap": 0.0}],
    "value_embeddings": [{"value_embeddings": False}],
    "residual_scalars": [{"residual_scalars": False}],
    "smear": [{"smear": False}],
    "backout": [{"backout": False}],
    "head_gate": [{"head_gate": True}],
    "document_mask": [{"document_mask": True}],
    "dropout": [{"dropout": 0.2}],
}
CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]
BF16 = {"fp8": "none"}
FP8 = {"fp8": "all", "pingpong": True, "fused_relu2": True, "fused_residual": True}
FP8_WITHOUT_QUACK = {"fp8": "all", "pingpong": False, "fused_relu2": False, "fused_residual": False}


def changed(change: dict) -> ModelConfig:
    config = replace(SMALL, **change)
    assert config != SMALL
    return config


def grown(config: ModelConfig, dtype: torch.dtype = torch.float32, **options) -> GPT:
    """A model in which every parameter matters: those that begin at zero do not stay there."""
    torch.manual_seed(0)
    model = GPT(config, dtype=dtype, **options)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(std=0.1)
            elif "smear_gate" in name or "value_gate" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2, config.context + 1), generator=generator)
    docs = torch.randint(0, 2, (2, config.context), generator=generator).cumsum(1)
    return tokens[:, :-1], tokens[:, 1:], docs if config.document_mask else None


def loss_and_gradients(forward, model: GPT) -> tuple[float, dict[str, torch.Tensor]]:
    loss = forward(*batch(model.config)) / 50
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}


def reference(config: ModelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """The plain trunk in float64 with the definitions of attention and loss."""
    model = grown(config, backends=("plain",) * config.depth).double()
    model.dtype = torch.float64

    def loss(tokens, targets, docs):
        hidden, head = model.hidden(tokens, docs), model.head.weight
        return plain_loss(hidden, head, targets, config.softcap, config.vocab_size)

    return loss_and_gradients(loss, model)


def test_every_field_has_a_decision():
    assert set(CHANGES) == {field.name for field in fields(ModelConfig)}, (
        "a new field needs a line in CHANGES, and its paths support it or reject it"
    )


@pytest.mark.parametrize(("field", "change"), CASES, ids=str)
def test_plain_training_has_the_loss_and_gradients_of_the_definition(field, change):
    config = changed(change)
    model = grown(config)
    (loss, gradients), (expected, truth) = loss_and_gradients(model, model), reference(config)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(gradient, truth[name]) < 1e-3, name


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        pytest.param(BF16, 2e-3, id="bf16"),
        pytest.param(FP8, 0.35, id="fp8", marks=pytest.mark.slow),
        pytest.param(FP8_WITHOUT_QUACK, 0.35, id="fp8-torch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("field", "change"), CASES, ids=str)
def test_fast_training_has_the_loss_and_gradients_of_the_plain_model_or_rejects_the_field(
    field, change, recipe, tolerance
):
    config, resolved = changed(change), consistent(Recipe(**recipe))
    if rejected := path.unsupported(config, resolved):
        assert {name.split("=")[0] for name in rejected} <= {field, "heads"}
        return
    model = grown(
        config
    )  # activations in fp32: what differs is the kernels, and FP8 where the recipe says so
    loss, gradients = loss_and_gradients(path.FastPath(model, resolved), model)
    expected, truth = reference(config)
    assert loss == pytest.approx(expected, rel=1e-4 if resolved.fp8 == "none" else 2e-2)
    for name, gradient in gradients.items():
        if resolved.fp8 == "none" or (gradient.dim() == 2 and "gate" not in name):
            assert relative_error(gradient, truth[name]) < tolerance, name


def expected_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(tokens[None])[0]


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize(("field", "change"), CASES, ids=str)
@torch.no_grad()
def test_prefill_and_decode_have_the_logits_of_the_plain_model_or_reject_the_field(field, change, fast):
    config = changed(change)
    if fast and (rejected := fast_decode.unsupported(config)):
        assert {name.split("=")[0] for name in rejected} <= {field, "heads"}
        return
    model = grown(config)
    frozen, cache = inference_copy(model), Cache(config, 2, CPU, torch.float32)
    tokens = torch.randint(
        0, config.vocab_size, (config.context,), generator=torch.Generator().manual_seed(2)
    )
    truth = expected_logits(model, tokens)
    split = config.context - 2
    prefill(frozen, cache, [1], [tokens[:11].tolist()], [0])
    prefill(frozen, cache, [1], [tokens[11:split].tolist()], [11])
    run = fast_decode.make_fast_decode(frozen, cache) if fast else None
    for at in range(split, config.context):
        inputs = torch.tensor([1]), tokens[at : at + 1], torch.tensor([at])
        logits = run(*inputs, None) if run is not None else decode(frozen, cache, *inputs)
        assert relative_error(logits[0], truth[at]) < 1e-3
