"""Reinforcement learning on a GPU: engine and trainer on one device."""

import pytest
from small_tasks import Echo, furnish, half_taught, open_task

from nanorun.runs import read_metrics
from nanorun.train import rl


@pytest.mark.parametrize(("dtype", "gap"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_engine_and_trainer_agree_and_the_reward_rises(home, dtype, gap):
    furnish(home, half_taught((Echo,)), "echoes")
    run = rl.configure(
        ["echo"],
        parent="echoes",
        name=dtype,
        steps=60,
        open_task=open_task,
        problems=16,
        samples=16,
        max_tokens=8,
        eval_problems=8,
        train={"eval_every": 0, "save_every": 100},
    )
    rl.train_rl(*run, rl.RLOptions(dtype=dtype), open_task)
    steps = [record for record in read_metrics(home / "runs" / dtype) if record["kind"] == "step"]
    assert max(record["logprob_gap"] for record in steps) < gap
    rewards = [record["reward"] for record in steps]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2
