"""Replies to learn from: problems in a fixed order, samples of each by the engine, rewards by their task.

The order of problems is a shuffle for each pass, made from the seed, and what a problem's samples are drawn with
depends on the seed and on how many problems were drawn before. So the one number of problems drawn so far is all
that a run must remember to go on with the very same problems and draws.

The engine holds the weights a second time, ready for decoding, and takes over the new ones before each step.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanorun.errors import UserError
from nanorun.evals.chat import chosen_questions, pass_at, reward_of
from nanorun.evals.replies import Answer, asked, fitting_slots, make_request, prompt_of, seed_of
from nanorun.infer.engine import Engine, Reply, Request, Sampling, Settings
from nanorun.model.gpt import GPT
from nanorun.tasks.task import Task
from nanorun.text.chat import parse_reply
from nanorun.text.tokenizer import Tokenizer
from nanorun.train.policy import Sample, advantages
from nanorun.train.rl_config import OpenTask, RLConfig

Tasks = Mapping[str, tuple[Task, Task]]  # by name: to learn from, and held out


@dataclass(frozen=True)
class Experience:
    """What one step learns from: the samples of each problem."""

    groups: list[list[Sample]]
    seconds: float

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]

    def figures(self) -> dict[str, Any]:
        samples = self.samples
        tokens = sum(sample.trained for sample in samples)
        nats = -sum(sum(sample.logprobs) for sample in samples)  # those of forced tokens are 0
        lengths = [len(sample.ids) for sample in samples]
        return {
            "reward": sum(sample.reward for sample in samples) / len(samples),
            "pass@1": sum(sample.reward >= 1 for sample in samples) / len(samples),
            "telling": sum(any(s.advantage for s in group) for group in self.groups) / len(self.groups),
            "length": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "cut": sum(not sample.stopped for sample in samples) / len(samples),
            "entropy": nats / tokens,
            "rollout_s": round(self.seconds, 4),
            "rollout_tokens_per_s": round(tokens / self.seconds, 1),
        }


@dataclass(frozen=True)
class HeldOut:
    """How the model does on problems that it does not learn from."""

    reward: float
    passes: dict[str, float]
    examples: list[dict[str, Any]]
    by_task: dict[str, float]  # the mean reward of each

    def figures(self) -> dict[str, Any]:
        each = self.by_task if len(self.by_task) > 1 else {}
        return {
            "val_reward": self.reward,
            **{f"val_reward_{task}": reward for task, reward in each.items()},
            **{f"val_pass@{k}": share for k, share in self.passes.items()},
        }

    def sentence(self) -> str:
        most = list(self.passes)[-1]
        return f"held-out reward {self.reward:.3f}, pass@{most} {self.passes[most]:.3f}"


def open_tasks(config: RLConfig, open_task: OpenTask) -> Tasks:
    return {spec: (open_task(spec, "train"), open_task(spec, "test")) for spec in config.tasks}


class Rollouts:
    """The feed of reinforcement learning: each `next` is one step's experience. Use it in a `with`."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        config: RLConfig,
        tasks: Tasks,
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
        self._order: tuple[int, list[int]] = (-1, [])  # of the pass that it is for
        self.held_out: list[tuple[str, Task, int]] = []
        share = -(-config.eval_problems // len(tasks))
        for spec, (_, task) in tasks.items():
            self.held_out += [(spec, task, i) for i in chosen_questions(len(task), share)]
        self.drawn = 0
        self.last: HeldOut | None = None  # what was last seen of them
        if state is not None:
            if state["problems"] != len(self.problems):
                raise UserError(
                    f"The run began with {state['problems']} problems and {', '.join(config.tasks)} now has "
                    f"{len(self.problems)}: put back the files that it had, or begin anew with --fresh."
                )
            self.drawn = state["drawn"]
        wanted = config.problems * config.samples
        slots = fitting_slots(model.config, model.embed.weight.device, wanted, model.dtype.itemsize)
        self.engine = Engine(model, tokenizer, Settings(slots=slots, tool_threads=0))

    def __iter__(self) -> "Rollouts":
        return self

    def __next__(self) -> Experience:
        start = time.perf_counter()
        config, first = self.config, self.drawn
        problems = [self.problem(first + i) for i in range(config.problems)]
        requests = [
            self._ask(self.tasks[spec], index, seed_of(self.seed, "rollout", first + i), logprobs=0)
            for i, (spec, index) in enumerate(problems)
        ]
        replies = self._generate(requests)
        groups = []
        for i, (spec, index) in enumerate(problems):
            mine = replies[i * config.samples : (i + 1) * config.samples]
            rewards = [self._judge(spec, self.tasks[spec], index, reply).reward or 0.0 for reply in mine]
            worth = advantages(rewards, config.normalize_std)
            prompt = list(requests[i].prompt)
            groups.append([_sample(prompt, *each) for each in zip(mine, rewards, worth, strict=True)])
        self.drawn += config.problems
        return Experience(groups, time.perf_counter() - start)

    def problem(self, number: int) -> tuple[str, int]:
        """Which problem is drawn as the so-many-th: each once a pass, every pass in another order."""
        epoch, at = divmod(number, len(self.problems))
        if self._order[0] != epoch:
            order = list(range(len(self.problems)))
            random.Random(seed_of(self.seed, "order", epoch)).shuffle(order)
            self._order = epoch, order
        return self.problems[self._order[1][at]]

    def evaluate(self) -> HeldOut:
        """Samples of the held-out problems, drawn with the same luck every time."""
        requests = [
            self._ask(task, index, seed_of(self.seed, "held out", spec, index))
            for spec, task, index in self.held_out
        ]
        replies = self._generate(requests)
        judged, many = list[Answer](), self.config.samples
        for i, (spec, task, index) in enumerate(self.held_out):
            judged += [self._judge(spec, task, index, reply) for reply in replies[i * many : (i + 1) * many]]
        rewards = [answer.reward or 0.0 for answer in judged]
        groups = [rewards[i : i + many] for i in range(0, len(rewards), many)]
        examples = [asdict(answer) for answer in judged[:: 3 * many + 1][:8]]
        by_task = {spec: [a.reward or 0.0 for a in judged if a.task == spec] for spec in self.tasks}
        means = {spec: sum(mine) / len(mine) for spec, mine in by_task.items() if mine}
        self.last = HeldOut(sum(rewards) / len(rewards), pass_at(groups), examples, means)
        return self.last

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "problems": len(self.problems)}

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def _ask(self, task: Task, index: int, seed: int, logprobs: int | None = None) -> Request:
        config = self.config
        prompt = prompt_of(task[index], self.tokenizer, self.model.config.context, config.max_tokens)
        sampling = Sampling(
            temperature=config.temperature, seed=seed
        )  # all else would be another distribution
        return make_request(prompt, self.tokenizer, sampling, config.max_tokens, config.samples, logprobs)

    def _generate(self, requests: Sequence[Request]) -> list[Reply]:
        self.engine.load_weights(self.model)
        replies = self.engine.generate(requests)
        # The engine may be resting only in a moment, and until then some libraries would use as few threads here
        # as it does, and round differently.
        torch.set_num_threads(torch.get_num_threads())
        return replies

    def _judge(self, spec: str, task: Task, index: int, reply: Reply) -> Answer:
        parts = parse_reply(reply.ids, self.tokenizer)
        answer = Answer(spec, index, 0, asked(task[index]), parts, reply.finish)
        return replace(answer, reward=reward_of(task, spec, answer))


def _sample(prompt: list[int], reply: Reply, reward: float, advantage: float) -> Sample:
    assert reply.logprobs is not None
    chosen = [not forced for forced in reply.forced]
    logprobs = [each.sampled for each in reply.logprobs]
    return Sample(prompt, reply.ids, chosen, logprobs, reward, advantage, reply.finish == "stop")
