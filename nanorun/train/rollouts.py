"""Rollouts to train on: problems in a fixed order, replies sampled by the engine, rewards by their task.

Each pass over the problems is a shuffle made from the seed, and the random numbers of a problem's rollouts depend on
the seed and on how many problems were drawn before. So that count is all that a run must save to resume with the very
same problems and samples.

The engine holds a second copy of the weights, laid out for decoding, and loads the new ones before each step.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from nanorun.data.loader import check_loader_state
from nanorun.errors import UserError
from nanorun.evals.chat import checked_reward, pass_at_k, select_questions
from nanorun.evals.replies import (
    GradedReply,
    derive_seed,
    max_slots,
    question_prompt,
    question_text,
    reply_request,
)
from nanorun.infer.engine import Engine, Reply, Request, Sampling, Settings
from nanorun.model.gpt import GPT
from nanorun.tasks.task import Task
from nanorun.text.chat import parse_reply
from nanorun.text.tokenizer import Tokenizer
from nanorun.train.policy import Rollout, advantages
from nanorun.train.rl_config import OpenTask, RLConfig

TaskSplits = Mapping[str, tuple[Task, Task]]  # by name: to train on, and held out


@dataclass(frozen=True)
class RolloutBatch:
    """What one step trains on: the rollouts of each problem."""

    groups: list[list[Rollout]]
    seconds: float

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    def figures(self) -> dict[str, Any]:
        rollouts = self.rollouts
        tokens = sum(rollout.sampled_tokens for rollout in rollouts)
        nats = -sum(sum(rollout.logprobs) for rollout in rollouts)  # those of forced tokens are 0
        lengths = [len(rollout.ids) for rollout in rollouts]
        return {
            "reward": sum(rollout.reward for rollout in rollouts) / len(rollouts),
            "pass@1": sum(rollout.reward >= 1 for rollout in rollouts) / len(rollouts),
            "telling": sum(any(r.advantage for r in group) for group in self.groups) / len(self.groups),
            "length": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "cut": sum(not rollout.has_stopped for rollout in rollouts) / len(rollouts),
            "entropy": nats / tokens,
            "rollout_s": round(self.seconds, 4),
            "rollout_tokens_per_s": round(tokens / self.seconds, 1),
        }


@dataclass(frozen=True)
class HeldOutResult:
    """Rewards on problems that are not trained on."""

    reward: float
    pass_at_k: dict[str, float]
    examples: list[dict[str, Any]]
    by_task: dict[str, float]  # the mean reward of each

    def figures(self) -> dict[str, Any]:
        each = self.by_task if len(self.by_task) > 1 else {}
        return {
            "val_reward": self.reward,
            **{f"val_reward_{task}": reward for task, reward in each.items()},
            **{f"val_pass@{k}": fraction for k, fraction in self.pass_at_k.items()},
        }

    def sentence(self) -> str:
        k, fraction = list(self.pass_at_k.items())[-1]
        return f"held-out reward {self.reward:.3f}, pass@{k} {fraction:.3f}"


def open_tasks(config: RLConfig, open_task: OpenTask) -> TaskSplits:
    return {spec: (open_task(spec, "train"), open_task(spec, "test")) for spec in config.tasks}


class RolloutSource:
    """The batch source of reinforcement learning: each `next` samples one step's rollouts. A context manager."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        config: RLConfig,
        tasks: TaskSplits,
        *,
        seed: int,
        rows: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config, self.seed, self.rows = model, tokenizer, config, seed, rows
        self.tasks = {spec: train for spec, (train, _) in tasks.items()}
        self.problems = [(spec, i) for spec in config.tasks for i in range(len(self.tasks[spec]))]
        if not self.problems:
            raise UserError(f"There are no problems in {', '.join(config.tasks)}: nothing can be learned.")
        self._order: tuple[int, list[int]] = (-1, [])  # epoch, and its shuffle
        self.held_out = self._select_held_out(tasks)
        self.on_sample: Callable[[], object] = lambda: None  # called as each rollout to train on is done
        self.drawn = 0
        self.last_result: HeldOutResult | None = None
        if state is not None:
            check_loader_state(state, {"problems": int, "drawn": int, "held_out?": (int, None)})
            if state["problems"] != len(self.problems):
                raise UserError(
                    f"The run began with {state['problems']} problems, but {', '.join(config.tasks)} now has "
                    f"{len(self.problems)}: restore its files, or start over with --fresh."
                )
            self.drawn = state["drawn"]
            self.held_out = self.held_out[: state.get("held_out")]
        batch = config.problems * config.samples
        slots = max_slots(model.config, model.embed.weight.device, batch, model.dtype.itemsize)
        self.engine = Engine(model, tokenizer, Settings(slots=slots, tool_threads=0))

    def __iter__(self) -> "RolloutSource":
        return self

    def __next__(self) -> RolloutBatch:
        start = time.perf_counter()
        numbers = range(self.drawn, self.drawn + self.config.problems)
        problems = [self.problem(number) for number in numbers]
        requests = [
            self._make_request(self.tasks[spec], index, derive_seed(self.seed, "rollout", number), logprobs=0)
            for number, (spec, index) in zip(numbers, problems, strict=True)
        ]
        groups = []
        self.engine.load_weights(self.model)
        sampled = self._sample(requests, self.on_sample)
        for (spec, index), request, replies in zip(problems, requests, sampled, strict=True):
            rewards = [self._grade(spec, self.tasks[spec], index, reply).reward or 0.0 for reply in replies]
            scored = zip(replies, rewards, advantages(rewards, self.config.normalize_std), strict=True)
            groups.append([_rollout(list(request.prompt), *each) for each in scored])
        self.drawn += self.config.problems
        return RolloutBatch(groups, time.perf_counter() - start)

    def problem(self, number: int) -> tuple[str, int]:
        """The problem drawn as number `number`: each once per epoch, every epoch in another order."""
        epoch, at = divmod(number, len(self.problems))
        if self._order[0] != epoch:
            order = list(range(len(self.problems)))
            random.Random(derive_seed(self.seed, "order", epoch)).shuffle(order)
            self._order = epoch, order
        return self.problems[self._order[1][at]]

    def evaluate(
        self, on_sample: Callable[[], object] | None = None, seconds: float = math.inf
    ) -> HeldOutResult:
        """Rewards of rollouts of the held-out problems, sampled with the same seeds every time.

        Problems that would take longer than `seconds` are dropped, here and from all later evaluations. Those of the
        first batch, as many as one step samples, always stay.
        """
        start, batch = time.perf_counter(), self.config.problems
        graded: list[GradedReply] = []
        self.engine.load_weights(self.model)
        for first in range(0, len(self.held_out), batch):
            if first and (time.perf_counter() - start) * (first + batch) / first > seconds:
                self.held_out = self.held_out[:first]
                break
            problems = self.held_out[first : first + batch]
            requests = [
                self._make_request(task, index, derive_seed(self.seed, "held out", spec, index))
                for spec, task, index in problems
            ]
            groups = zip(problems, self._sample(requests, on_sample), strict=True)
            graded += [self._grade(*problem, reply) for problem, replies in groups for reply in replies]
        rewards, n = [reply.reward or 0.0 for reply in graded], self.config.samples
        by_task: dict[str, list[float]] = {}
        for reply, reward in zip(graded, rewards, strict=True):
            by_task.setdefault(reply.task, []).append(reward)
        self.last_result = HeldOutResult(
            sum(rewards) / len(rewards),
            pass_at_k([rewards[i : i + n] for i in range(0, len(rewards), n)]),
            [asdict(reply) for reply in graded[:: 3 * n + 1][:8]],
            {spec: sum(each) / len(each) for spec, each in by_task.items()},
        )
        return self.last_result

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "problems": len(self.problems), "held_out": len(self.held_out)}

    def __enter__(self) -> "RolloutSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def _select_held_out(self, tasks: TaskSplits) -> list[tuple[str, Task, int]]:
        """Tasks by turns, each in random order: any number of the first ones is a fair sample."""
        per_task = -(-self.config.eval_problems // len(tasks))
        columns = []
        for spec, (_, task) in tasks.items():
            indices = select_questions(len(task), per_task)
            random.Random(derive_seed("held out", spec)).shuffle(indices)
            columns.append([(spec, task, index) for index in indices])
        return [problem for turn in zip_longest(*columns) for problem in turn if problem is not None]

    def _make_request(self, task: Task, index: int, seed: int, logprobs: int | None = None) -> Request:
        config = self.config
        prompt = question_prompt(task[index], self.tokenizer, self.model.config.context, config.max_tokens)
        # No top-k or top-p: rollouts must come from the distribution that the loss is computed for.
        sampling = Sampling(temperature=config.temperature, seed=seed)
        return reply_request(prompt, self.tokenizer, sampling, config.max_tokens, config.samples, logprobs)

    def _sample(
        self, requests: Sequence[Request], on_sample: Callable[[], object] | None
    ) -> list[list[Reply]]:
        """The replies to each request."""
        replies, n = self.engine.generate(requests, on_sample=on_sample), self.config.samples
        # The engine's thread may go idle only a moment later, and until then some libraries would use as few threads
        # here as it does, and round differently.
        torch.set_num_threads(torch.get_num_threads())
        return [replies[i : i + n] for i in range(0, len(replies), n)]

    def _grade(self, spec: str, task: Task, index: int, reply: Reply) -> GradedReply:
        parts = parse_reply(reply.ids, self.tokenizer)
        answer = GradedReply(spec, index, 0, question_text(task[index]), parts, reply.finish)
        return replace(answer, reward=checked_reward(task, answer))


def _rollout(prompt: list[int], reply: Reply, reward: float, advantage: float) -> Rollout:
    assert reply.logprobs is not None
    is_sampled = [not forced for forced in reply.forced]
    logprobs = [each.under_sampling for each in reply.logprobs]
    return Rollout(prompt, reply.ids, is_sampled, logprobs, reward, advantage, reply.finish == "stop")
