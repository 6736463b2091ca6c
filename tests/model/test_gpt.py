"""The model is what its recipe says, whatever switches are on."""

from dataclasses import replace

import pytest
import torch

from nanorun.config import scale_model
from nanorun.infer.plain import generate
from nanorun.model.fast.path import recompute_blocks
from nanorun.model.gpt import GPT, build, positions_in_documents
from nanorun.model.loss import plain_loss

CPU = torch.device("cpu")


def tiny(**changes):
    return scale_model(
        3, 97, context=24, **{"dim": 64, "heads": 4, "kv_heads": 2, "short_window": 8, **changes}
    )


def grown(config, dtype=torch.float64, seed=0, backend="plain"):
    """A model whose every parameter is far from its (partly zero) start, so that each has an effect."""
    model = build(config, CPU, dtype, (backend,) * config.depth, seed).to(dtype)
    dice = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice, dtype=parameter.dtype)
    return model


def batch(config, rows=2, time=None, seed=0):
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows, (time or config.context) + 1), generator=dice)
    return tokens[:, :-1], tokens[:, 1:].clone()


def test_parameters_are_as_many_as_the_configuration_says():
    for config in (
        tiny(),
        tiny(value_embeddings=False, smear=False),
        scale_model(5, 300, residual_scalars=False),
    ):
        with torch.device("meta"):
            model = GPT(config)
        assert sum(p.numel() for p in model.parameters()) == config.total_parameters


def test_at_the_start_every_token_is_about_equally_likely():
    config = tiny()
    model = build(config, CPU, torch.float32)
    tokens, targets = batch(config)
    loss = model(tokens, targets) / targets.numel()
    assert loss.item() == pytest.approx(torch.tensor(97.0).log().item(), abs=0.01)


def test_a_token_never_sees_what_comes_after_it():
    config = tiny()
    model = grown(config)
    tokens, _ = batch(config, rows=1)
    before = model.logits(tokens)
    for at in (1, 7, 23):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % 97
        after = model.logits(changed)
        assert torch.equal(before[0, :at], after[0, :at])
        assert not torch.allclose(before[0, at], after[0, at])


def test_windows_bound_how_far_back_a_layer_sees():
    config = tiny(windows="S", short_window=4, smear=False, backout=False)
    one_layer = replace(config, depth=1)
    assert [config.window(i) for i in range(3)] == [4, 4, 24], "the last layer is always long"
    assert one_layer.window(0) == 24


def test_documents_are_separate_when_masked():
    config = tiny(document_mask=True)
    model = grown(config)
    tokens, _ = batch(config, rows=1)
    docs = torch.tensor([[0] * 9 + [1] * 15])
    together = model.logits(tokens, docs)
    torch.testing.assert_close(together[:, :9], model.logits(tokens[:, :9], docs[:, :9]))
    torch.testing.assert_close(together[:, 9:], model.logits(tokens[:, 9:], docs[:, 9:] * 0))


def test_positions_restart_with_every_document():
    docs = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])
    assert positions_in_documents(docs).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("switch", ["value_embeddings", "residual_scalars", "smear", "backout"])
def test_each_switch_can_be_off_and_all_parameters_that_remain_are_trained(switch):
    config = tiny(**{switch: False})
    model = grown(config)
    tokens, targets = batch(config)
    model(tokens, targets).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_recomputation_changes_no_gradient():
    tokens, targets = batch(tiny())
    gradients = []
    for recompute in (False, True):
        model = grown(tiny())
        if recompute:
            recompute_blocks(model)
        model(tokens, targets).backward()
        gradients.append([p.grad for p in model.parameters()])
    for kept, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, computed)


def test_gradients_are_those_of_the_plain_loss_and_plain_attention():
    config = tiny()
    tokens, targets = batch(config)
    targets[0, :5] = -1
    results = []
    for backend in ("plain", "sdpa"):
        model = GPT(config, (backend,) * 3, torch.float64).double()
        model.load_state_dict(grown(config).state_dict())
        model.init_buffers()
        if backend == "plain":
            hidden, head = model.hidden(tokens), model.head.weight
            total = plain_loss(hidden, head, targets, config.softcap, config.vocab_size)
        else:
            total = model(tokens, targets)
        total.backward()
        results.append([total, *(p.grad for p in model.parameters())])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


def test_the_padding_of_the_vocabulary_is_never_predicted():
    config = tiny()
    model = grown(config)
    tokens, targets = batch(config)
    assert config.padded_vocab == 128
    assert model.logits(tokens).shape[-1] == 97
    model(tokens, targets).backward()
    assert model.head.weight.grad is not None
    assert model.head.weight.grad[97:].abs().sum() == 0


def test_the_same_seed_builds_the_same_model():
    one, two, other = (build(tiny(), CPU, torch.float32, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])


def test_generation_is_repeatable_and_stops():
    config = tiny()
    model = grown(config, torch.float32)
    greedy = generate(model, [[1, 2, 3], [4]], 30, temperature=0)
    assert greedy == generate(model, [[1, 2, 3], [4]], 30, temperature=0)
    assert [len(reply) for reply in greedy] == [30, 30], "it goes on past the context"
    assert generate(model, [[4]], 30, seed=1) == generate(model, [[4], [1, 2, 3]], 30, seed=1)[:1]
    assert (
        generate(model, [[1, 2, 3]], 30, temperature=0, stop=[greedy[0][4]])[0]
        == greedy[0][: greedy[0].index(greedy[0][4])]
    )
