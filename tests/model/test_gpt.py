"""The model is what its recipe says, whatever switches are on."""

from dataclasses import replace

import pytest
import torch

from nanorun.config import scale_model
from nanorun.infer.plain import generate
from nanorun.model.gpt import GPT, Means, build, positions_in_documents

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


@pytest.mark.parametrize("switch", ["value_embeddings", "residual_scalars", "smear", "backout", "recompute"])
def test_each_switch_can_be_off_and_all_parameters_that_remain_are_trained(switch):
    config = tiny(**{switch: switch == "recompute"})
    model = grown(config)
    tokens, targets = batch(config)
    model(tokens, targets).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_recomputation_changes_no_gradient():
    tokens, targets = batch(tiny())
    gradients = []
    for recompute in (False, True):
        model = grown(tiny(recompute=recompute))
        model(tokens, targets).backward()
        gradients.append([p.grad for p in model.parameters()])
    for kept, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, computed)


def test_one_matmul_for_queries_keys_and_values_changes_no_gradient():
    tokens, targets = batch(tiny())
    results = []
    for fused in (False, True):
        model = grown(tiny(fused_qkv=fused)).double()
        model.dtype = torch.float64
        total = model(tokens, targets)
        total.backward()
        results.append([total, *(p.grad for p in model.parameters())])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(one, three)


def test_gradients_are_those_of_the_plain_loss_and_plain_attention():
    config = tiny()
    tokens, targets = batch(config)
    targets[0, :5] = -1
    results = []
    for loss, backend in (("plain", "plain"), ("chunked", "sdpa")):
        model = GPT(config, (backend,) * 3, torch.float64, loss).double()
        model.load_state_dict(grown(config).state_dict())
        model.init_buffers()
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


def test_gradients_of_tables_added_in_place_are_autograd_s_and_begin_at_zero_again():
    torch.manual_seed(0)
    models = [GPT(tiny(), means=Means(in_place=way)) for way in (False, True)]
    models[0].init_weights()
    models[1].load_state_dict(models[0].state_dict())
    models[1].init_buffers()
    models[1].renew()
    tokens = torch.randint(0, 97, (3, 2, 25))
    for model in models:
        for micro in tokens:
            model(micro[:, :-1], micro[:, 1:]).backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert models[1].embed.weight.grad is models[1].embed.sums
    models[1].renew()
    assert models[1].embed.weight.grad.eq(0).all()
    with torch.no_grad():
        assert models[0](tokens[0, :, :-1], tokens[0, :, 1:]) == models[1](
            tokens[0, :, :-1], tokens[0, :, 1:]
        )


@pytest.mark.parametrize("fused", [True, False])
def test_copies_cast_once_give_what_casting_at_each_use_gives(fused):
    torch.manual_seed(0)
    config = tiny(fused_qkv=fused)
    models = [
        GPT(config, dtype=torch.bfloat16, means=Means(copied_as=kind)) for kind in (None, torch.bfloat16)
    ]
    models[0].init_weights()
    with torch.no_grad():
        for block in models[0].layers():  # zero at first, so that nothing behind them would be tested
            torch.nn.init.normal_(block.attention.out.weight, std=0.1)
            torch.nn.init.normal_(block.mlp.down.weight, std=0.1)
    models[1].load_state_dict(models[0].state_dict())
    models[1].init_buffers()
    models[1].renew()
    tokens = torch.randint(0, config.vocab_size, (2, config.context + 1))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in models]
    for loss in losses:
        loss.backward()
    assert losses[0] == losses[1]
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 0.01 * one.grad.norm(), name


def test_eight_bits_are_chosen_where_they_are_there_and_pay():
    wide, narrow = scale_model(12, 500), scale_model(4, 500)
    assert wide.eight_bits(possible=True) == "all"
    assert wide.eight_bits(possible=False) == narrow.eight_bits(possible=True) == "none"
    assert replace(narrow, fp8="mlp").eight_bits(possible=False) == "mlp", (
        "what was asked for stays asked for"
    )
    model = build(replace(narrow, dim=768, heads=6, kv_heads=6, depth=1), torch.device("cpu"), torch.float32)
    assert model.config.fp8 == "none", "and a model says what was chosen"
