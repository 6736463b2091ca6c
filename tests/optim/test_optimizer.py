"""The optimizer against plain loops in float64, torch's own AdamW, and the compiler."""

from dataclasses import replace

import pytest
import torch
from small_model import CONFIG, build, model_parameters, set_gradients, train
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nanorun.config import OptimConfig
from nanorun.optim import groups
from nanorun.optim.adamw import EPSILON
from nanorun.optim.groups import ParameterGroup, group_parameters
from nanorun.optim.muon import MuonGroup, muon_update, orthogonalize
from nanorun.optim.optimizer import Optimizer
from nanorun.optim.schedules import ScheduledHyperparameters, scheduled_hyperparameters


def matrix_optimizer(matrices: list[nn.Parameter], config: OptimConfig) -> Optimizer:
    names = tuple(f"matrix.{i}" for i in range(len(matrices)))
    group = ParameterGroup(
        "matrices", config.matrix_lr, config.matrix_weight_decay, None, names, tuple(matrices)
    )
    return Optimizer([group], config, compiled=False)


# --- Muon -------------------------------------------------------------------------------------------------


def plain_muon(
    start: Tensor, gradients: list[Tensor], schedule: list[ScheduledHyperparameters], config: OptimConfig
) -> Tensor:
    """One matrix, one line an idea, no stacking: what `muon_update` must equal."""
    w, rows, cols = start.clone(), *start.shape
    momentum = torch.zeros_like(w)
    moments = torch.zeros(max(rows, cols), dtype=w.dtype)
    for grad, now in zip(gradients, schedule, strict=True):
        momentum = now.momentum * momentum + (1 - now.momentum) * grad
        update = momentum
        if config.nesterov:
            update = now.momentum * momentum + (1 - now.momentum) * grad
        update = orthogonalize(update, config.orthogonalize)
        if config.normuon:
            lines = update if rows >= cols else update.T.clone()
            evened = torch.empty_like(lines)
            for i, line in enumerate(lines):
                moments[i] = config.beta2 * moments[i] + (1 - config.beta2) * (line**2).mean()
                evened[i] = line / moments[i].sqrt()
            evened = evened * (lines.norm() / evened.norm())
            update = evened if rows >= cols else evened.T
        if rows > cols:
            update = update * (rows / cols) ** 0.5
        rate, decay = config.matrix_lr * now.lr_scale, config.matrix_weight_decay * now.weight_decay_scale
        for i in range(rows):
            for j in range(cols):
                if not config.cautious_decay or update[i, j] * w[i, j] >= 0:
                    w[i, j] = w[i, j] - rate * decay * w[i, j]
        w = w - rate * update
    return w


VARIANTS = {
    "default": CONFIG,
    "newton_schulz": replace(CONFIG, orthogonalize="newton_schulz"),
    "no_normuon": replace(CONFIG, normuon=False),
    "plain_decay": replace(CONFIG, cautious_decay=False),
    "no_nesterov": replace(CONFIG, nesterov=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)], ids=str)
def test_a_stack_of_matrices_follows_the_plain_loop(variant, shape):
    config = replace(VARIANTS[variant], matrix_lr=0.1)
    torch.manual_seed(0)
    starts = torch.randn(3, *shape, dtype=torch.float64)
    gradients = torch.randn(8, 3, *shape, dtype=torch.float64)
    schedule = [scheduled_hyperparameters(step, 8, replace(config, warmup_steps=3)) for step in range(8)]
    matrices = [nn.Parameter(start.clone()) for start in starts]
    optimizer = matrix_optimizer(matrices, config)
    assert len(optimizer.update_groups) == 1
    for grads, now in zip(gradients, schedule, strict=True):
        for matrix, grad in zip(matrices, grads, strict=True):
            matrix.grad = grad.clone()
        optimizer.step(now)
    for i, matrix in enumerate(matrices):
        expected = plain_muon(starts[i], list(gradients[:, i]), schedule, config)
        assert (expected - starts[i]).norm() > 0.5  # not a trivial update
        torch.testing.assert_close(matrix.detach(), expected, rtol=1e-9, atol=1e-9)


def test_a_discarded_update_changes_nothing_and_is_not_counted():
    twice, once = model_parameters(), model_parameters()
    optimizers = [
        Optimizer(group_parameters(p.items(), CONFIG), CONFIG, compiled=False) for p in (twice, once)
    ]
    for step in range(3):
        set_gradients(twice, step)
        set_gradients(once, step)
        optimizers[1].step(scheduled_hyperparameters(step, 4, CONFIG))
        optimizers[0].step(scheduled_hyperparameters(step, 4, CONFIG), apply_update=torch.tensor(True))
        for param in twice.values():
            param.grad = torch.full_like(param, float("nan"))
        optimizers[0].step(scheduled_hyperparameters(step, 4, CONFIG), apply_update=torch.tensor(False))
        optimizers[0].discard_step()
    for name in once:
        assert torch.equal(twice[name], once[name]), name
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_a_stack_moves_as_its_matrices_would_alone():
    together, alone = model_parameters(), model_parameters()
    matrices = [name for name in together if ".mlp." in name or ".attention.q" in name]
    stacked = matrix_optimizer([together[name] for name in matrices], CONFIG)
    singles = [matrix_optimizer([alone[name]], CONFIG) for name in matrices]
    assert len(stacked.update_groups) == 3  # up, down, q
    for step in range(4):
        set_gradients(together, step)
        set_gradients(alone, step)
        for optimizer in (stacked, *singles):
            optimizer.step(scheduled_hyperparameters(step, 4, CONFIG))
    for name in matrices:
        torch.testing.assert_close(together[name], alone[name], rtol=1e-11, atol=1e-12)


def test_large_matrices_are_updated_a_few_at_a_time_to_the_same_effect(monkeypatch):
    whole, parted = model_parameters(), model_parameters()
    at_once = build(whole)
    monkeypatch.setattr(groups, "STACK_BYTES", 512)  # four of k and v, two of q and out, one of the MLP
    a_few = build(parted)
    lengths = [len(unit.group.params) for unit in a_few.update_groups if isinstance(unit, MuonGroup)]
    assert sum(lengths) == sum(len(u.group.params) for u in at_once.update_groups if isinstance(u, MuonGroup))
    assert set(lengths) == {1, 2, 4}
    train(whole, at_once, 0, 4)
    train(parted, a_few, 0, 4)
    for name in whole:
        torch.testing.assert_close(whole[name], parted[name], rtol=1e-11, atol=1e-12)


def test_large_tables_are_updated_one_by_one_to_the_same_effect(monkeypatch):
    def tables() -> dict[str, nn.Parameter]:
        dice = torch.Generator().manual_seed(3)
        shapes = {"gate": (2, 3), "first": (20, 4), "bias": (5,), "second": (20, 4)}
        return {name: nn.Parameter(torch.randn(shape, generator=dice)) for name, shape in shapes.items()}

    def optimizer(params: dict[str, nn.Parameter]) -> Optimizer:
        group = ParameterGroup("tables", 0.1, 0.01, (0.8, 0.95), tuple(params), tuple(params.values()))
        return Optimizer([group], CONFIG, compiled=False)

    whole, parted = tables(), tables()
    at_once = optimizer(whole)
    monkeypatch.setattr(groups, "LARGE_NUMEL", 60)
    one_by_one = optimizer(parted)
    assert [unit.group.names for unit in one_by_one.update_groups] == [
        ("first",),
        ("second",),
        ("gate", "bias"),
    ]
    train(whole, at_once, 0, 4)
    train(parted, one_by_one, 0, 4)
    assert all(torch.equal(whole[name], parted[name]) for name in whole)
    assert one_by_one.state_dict().keys() == at_once.state_dict().keys()


def test_stacks_are_of_equal_length_and_never_too_large():
    for matrices, numbers in ((48, 768**2), (160, 2560**2), (47, 4 * 3008**2), (3, 10**9)):
        length = groups.stack_length(matrices, numbers)
        assert matrices % length == 0
        assert length == 1 or 4 * length * numbers <= groups.STACK_BYTES
    assert groups.stack_length(48, 768**2) == 48


@pytest.mark.parametrize("shape", [(3, 10, 10), (3, 24, 8), (3, 8, 24)], ids=str)
def test_normuon_equalizes_row_norms_and_keeps_the_frobenius_norm(shape):
    torch.manual_seed(1)
    grads = torch.randn(shape, dtype=torch.float64) * torch.logspace(-2, 1, shape[1])[:, None]
    grads = grads * torch.logspace(-1, 1, shape[2])
    zeros, average = torch.zeros_like(grads), -1 if shape[1] >= shape[2] else -2

    def update(second: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of weights of zero, without momentum and weight decay, at a learning rate of 1."""
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 0.0, 0.0, 0.9)]
        switches = {"method": "polar_express", "nesterov": False, "cautious": False}
        new, _, second = muon_update(zeros, grads, zeros, second, *scalars, dtype=None, **switches)
        return new, second

    plain, _ = update(None)
    second = zeros.sum(average, keepdim=True)
    for _ in range(3):
        evened, second = update(second)
        torch.testing.assert_close(torch.linalg.matrix_norm(evened), torch.linalg.matrix_norm(plain))
    before, lines = plain.square().mean(average), evened.square().mean(average)
    assert before.amax() > 1.05 * before.amin()
    # The same update each time, so all rows end with the same norm.
    torch.testing.assert_close(lines, lines.mean(-1, keepdim=True).expand_as(lines))


def test_a_matrix_without_any_gradient_stays_put_and_finite():
    matrix = nn.Parameter(torch.randn(4, 6))
    before = matrix.detach().clone()
    optimizer = matrix_optimizer([matrix], replace(CONFIG, matrix_weight_decay=0.0))
    matrix.grad = torch.zeros_like(matrix)
    optimizer.step(ScheduledHyperparameters(1.0, 0.9, 1.0))
    assert torch.equal(matrix, before)


def test_cautious_decay_shrinks_only_what_the_update_shrinks_too():
    torch.manual_seed(2)
    params, grads = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    zeros = torch.zeros_like(params)

    def after(decay: float, cautious: bool = True) -> Tensor:
        scalars = [torch.tensor(value, dtype=torch.float64) for value in (0.1, 0.9, decay, 0.9)]
        switches = {"method": "polar_express", "nesterov": True, "cautious": cautious}
        return muon_update(params, grads, zeros, None, *scalars, dtype=None, **switches)[0]

    shrinks = (params - after(0.0)) * params >= 0  # without decay the update alone moves it towards zero
    assert 0.2 < shrinks.double().mean() < 0.8
    pulled = after(0.0) - after(0.5)
    torch.testing.assert_close(pulled, torch.where(shrinks, 0.1 * 0.5 * params, zeros))
    torch.testing.assert_close(after(0.0) - after(0.5, cautious=False), 0.1 * 0.5 * params)


def test_muon_solves_a_skewed_regression_in_fewer_updates_than_sgd():
    """Input directions of sizes 1 to 1/60, all equally needed: the largest limits the learning rate of SGD."""
    torch.manual_seed(3)
    sizes = torch.logspace(0, -1.8, 16)
    inputs = 8 * torch.linalg.qr(torch.randn(64, 16))[0] * sizes
    target = inputs @ (torch.linalg.qr(torch.randn(16, 16))[0] / sizes[:, None])

    def loss_after_100(rate: float, muon: bool) -> float:
        weight = nn.Parameter(torch.zeros(16, 16))
        config = replace(CONFIG, matrix_lr=rate, matrix_weight_decay=0.0, warmup_steps=0)
        optimizer = matrix_optimizer([weight], config)
        sgd = torch.optim.SGD([weight], rate, momentum=0.9)
        for step in range(100):
            loss = (inputs @ weight.T - target).square().sum() / 64
            weight.grad = torch.autograd.grad(loss, weight)[0]
            now = scheduled_hyperparameters(step, 100, config)
            sgd.param_groups[0]["lr"] = rate * now.lr_scale
            if muon:
                optimizer.step(now)
            else:
                sgd.step()
        return loss.item()

    best_sgd = min(loss_after_100(rate, muon=False) for rate in (0.1, 0.3, 1.0, 1.5))
    best_muon = min(loss_after_100(rate, muon=True) for rate in (0.3, 1.0, 3.0))
    assert best_muon < best_sgd / 4


# --- AdamW ------------------------------------------------------------------------------------------------


def test_adamw_is_torchs_adamw():
    ours, theirs = model_parameters(), model_parameters()
    groups = [group for group in group_parameters(ours.items(), CONFIG) if group.betas]
    groups = [replace(group, lr=0.01, weight_decay=group.weight_decay + 0.1) for group in groups]
    optimizer = Optimizer(groups, CONFIG, compiled=False)
    reference = torch.optim.AdamW(
        [
            {
                "params": [theirs[name] for name in group.names],
                "lr": group.lr,
                "betas": group.betas,
                "weight_decay": group.weight_decay,
            }
            for group in groups
        ],
        eps=EPSILON,
    )
    for step in range(6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(ScheduledHyperparameters(1.0, 0.9, 1.0))
        reference.step()
    start = model_parameters()
    for name in (name for group in groups for name in group.names):
        assert not torch.equal(ours[name], start[name])
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


# --- groups -----------------------------------------------------------------------------------------------


def test_every_parameter_is_in_the_group_its_name_says():
    params = model_parameters()
    groups = {group.name: group for group in group_parameters(params.items(), CONFIG)}
    assert sorted(name for group in groups.values() for name in group.names) == sorted(params)
    assert len(groups["matrices"].names) == 12
    assert groups["matrices"].betas is None
    assert groups["gates"].names == (
        "blocks.1.attention.value_gate.weight",
        "smear_gate.weight",
        "smear_scale",
        "backout_scale",
    )
    facts = {name: (group.lr, group.weight_decay, group.betas) for name, group in groups.items()}
    assert facts == {
        "matrices": (0.02, 0.28, None),
        "head": (0.008, 0.01, (0.8, 0.96)),
        "embedding": (0.3, 0.001, (0.8, 0.995)),
        "value_embeddings": (0.15, 0.01, (0.8, 0.995)),
        "lambdas": (0.005, 0.05, (0.8, 0.95)),
        "mus": (0.05, 0.0, (0.96, 0.95)),
        "gates": (0.05, 0.0, (0.8, 0.95)),
    }


@pytest.mark.parametrize("name", ["blocks.0.attention.new.weight", "blocks.0.mlp.up.bias", "xembed.weight"])
def test_a_parameter_that_no_rule_matches_is_an_error(name):
    params = {**model_parameters(), name: nn.Parameter(torch.zeros(8, 8))}
    with pytest.raises(ValueError, match=name):
        group_parameters(params.items(), CONFIG)
    params[name].requires_grad_(False)
    assert all(name not in group.names for group in group_parameters(params.items(), CONFIG))


def test_a_frozen_parameter_is_left_alone_and_one_without_gradient_stops_the_step():
    params = model_parameters()
    params["embed.weight"].requires_grad_(False)
    optimizer = build(params)
    set_gradients(params, 0)
    optimizer.step(ScheduledHyperparameters(1.0, 0.9, 1.0))
    start = model_parameters()
    assert torch.equal(params["embed.weight"], start["embed.weight"])
    moved = {name: param.detach().clone() for name, param in params.items()}
    params["mus"].grad = None
    with pytest.raises(ValueError, match="no gradient for mus"):
        optimizer.step(ScheduledHyperparameters(1.0, 0.9, 1.0))
    assert all(torch.equal(params[name], moved[name]) for name in params)


# --- gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs_clipping(max_norm):
    ours, theirs = model_parameters(), model_parameters()
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    norm = build(ours).clip_grad_norm(max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.values(), max_norm))
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)


def test_without_a_limit_clip_grad_norm_only_returns_the_norm():
    params = model_parameters()
    set_gradients(params, 0)
    before = {name: param.grad.clone() for name, param in params.items()}
    norm = build(params).clip_grad_norm(None)
    expected = torch.cat([grad.flatten() for grad in before.values()]).norm()
    torch.testing.assert_close(norm, expected)
    assert all(torch.equal(params[name].grad, before[name]) for name in params)


def test_gradients_are_dropped_or_zeroed_in_place():
    params = model_parameters()
    optimizer = build(params)
    set_gradients(params, 0)
    buffers = {name: param.grad for name, param in params.items()}
    optimizer.zero_grad(keep_buffers=True)
    assert all(param.grad is buffers[name] and not param.grad.any() for name, param in params.items())
    optimizer.zero_grad()
    assert all(param.grad is None for param in params.values())
    optimizer.zero_grad(keep_buffers=True)  # nothing to keep


# --- the compiler -----------------------------------------------------------------------------------------


def test_schedules_never_recompile_and_compiled_equals_eager():
    torch._dynamo.reset()
    counters.clear()
    compiled_params, eager_params = model_parameters(torch.float32), model_parameters(torch.float32)
    compiled = build(compiled_params, compiled=True, backend="aot_eager")
    eager = build(eager_params)
    for step in range(
        6
    ):  # learning rate, momentum, weight decay and bias corrections all differ from step to step
        set_gradients(compiled_params, step)
        set_gradients(eager_params, step)
        now = scheduled_hyperparameters(step, 10, CONFIG)
        compiled.step(now)
        eager.step(now)
        # Matrices come in 4 shapes. Of the 6 groups for AdamW, head and embedding are alike, lambdas and mus.
        assert counters["stats"]["unique_graphs"] == 4 + 4
    for name in compiled_params:
        torch.testing.assert_close(compiled_params[name], eager_params[name], rtol=1e-4, atol=1e-5)


def test_fp64_is_not_compiled():
    with pytest.raises(ValueError, match="fp64"):
        build(model_parameters(), compiled=True)


def test_many_models_in_one_process_do_not_run_into_the_compilers_limit():
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    for width in range(2, 2 + limit + 2):
        matrix = nn.Parameter(torch.randn(width, 3))
        group = ParameterGroup("matrices", 0.02, 0.1, None, ("matrix",), (matrix,))
        optimizer = Optimizer([group], CONFIG, compiled=True, backend="eager")
        matrix.grad = torch.randn_like(matrix)
        optimizer.step(ScheduledHyperparameters(1.0, 0.9, 1.0))
        assert matrix.isfinite().all()
