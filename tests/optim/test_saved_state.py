"""Optimizer state: saved, loaded by an optimizer with other stacks, rejected where it does not match."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_model import build, model_parameters, train

from nanorun.errors import UserError


def test_a_new_process_resumes_bit_identically(tmp_path: Path):
    straight = model_parameters(torch.float32)
    train(straight, build(straight), 0, 10)

    params = model_parameters(torch.float32)
    optimizer = build(params)
    train(params, optimizer, 0, 4)
    torch.save({name: param.detach() for name, param in params.items()}, tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small_model import build, train
torch.set_num_threads(1)
params = {{name: torch.nn.Parameter(value) for name, value in torch.load("model.pt").items()}}
optimizer = build(params)
optimizer.load_state_dict(torch.load("optim.pt"))
assert optimizer.updates == 4
train(params, optimizer, 4, 10)
torch.save({{name: param.detach() for name, param in params.items()}}, "end.pt")
"""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)
    end = torch.load(tmp_path / "end.pt")
    assert all(torch.equal(end[name], straight[name]) for name in straight)


def test_the_state_round_trips_through_safetensors(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.torch")
    params = model_parameters(torch.float32)
    optimizer = build(params)
    train(params, optimizer, 0, 2)
    safetensors.save_file(optimizer.state_dict(), tmp_path / "optim.safetensors")
    fresh = build(model_parameters(torch.float32))
    fresh.load_state_dict(safetensors.load_file(tmp_path / "optim.safetensors"))
    assert fresh.updates == 2
    state = fresh.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in optimizer.state_dict().items())


def test_the_state_is_by_parameter_and_fits_other_stacks():
    """Saved by one optimizer over everything, loaded by one with the layers in another order."""
    params, other = model_parameters(), model_parameters()
    optimizer = build(params)
    train(params, optimizer, 0, 3)
    reordered = build(dict(reversed(other.items())))
    assert optimizer.update_groups[0].group.names != reordered.update_groups[0].group.names
    for name, param in other.items():
        param.data.copy_(params[name])
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert state["blocks.0.mlp.up.weight.momentum"].shape == (32, 8)
    assert state["blocks.0.mlp.up.weight.second_moment"].shape == (32, 1)
    assert state["blocks.0.mlp.down.weight.second_moment"].shape == (1, 32)
    reordered.load_state_dict(state)
    train(params, optimizer, 3, 6)
    train(other, reordered, 3, 6)
    for name in params:
        torch.testing.assert_close(params[name], other[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda state: state.pop("mus.first_moment"), "mus.first_moment is missing"),
        (lambda state: state.pop("updates"), "updates is missing"),
        (lambda state: state.update(stray=torch.zeros(1)), "stray is unexpected"),
        (
            lambda state: state.update({"lambdas.first_moment": torch.zeros(3)}),
            r"lambdas.first_moment is \(3,\) float32, expected \(2,\) float64",
        ),
    ],
)
def test_a_state_that_does_not_match_is_rejected_and_changes_nothing(damage, says):
    params = model_parameters()
    optimizer = build(params)
    train(params, optimizer, 0, 2)
    kept = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    bad = {name: torch.ones_like(tensor) for name, tensor in kept.items()}
    damage(bad)
    with pytest.raises(UserError, match=says):
        optimizer.load_state_dict(bad)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in optimizer.state_dict().items())


def test_half_precision_parameters_keep_their_state_in_float32():
    params = model_parameters(torch.bfloat16)
    optimizer = build(params)
    train(params, optimizer, 0, 2)
    assert all(param.dtype == torch.bfloat16 and param.isfinite().all() for param in params.values())
    state = optimizer.state_dict()
    del state["updates"]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
