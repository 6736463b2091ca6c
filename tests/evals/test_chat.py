"""ChatCORE: the same numbers every time, in any batch, on one machine or two; and intervals that are right."""

import itertools
import json
import math
import random
import signal

import pytest
import torch
from small_tasks import (
    HERE,
    Echo,
    Pick,
    Sandboxed,
    Sum,
    byte_tokenizer,
    furnish,
    half_taught,
    open_task,
    talk,
)

from nanorun import cli, tables
from nanorun.errors import UserError
from nanorun.evals import chat, replies
from nanorun.evals.chat import (
    ChatEvalOptions,
    evaluate_chat,
    grade_file,
    pass_at_k,
    select_questions,
    wilson_interval,
)
from nanorun.evals.replies import ReplySettings, choose_letters, derive_seed, generate_replies
from nanorun.tasks import catalogue
from nanorun.text.chat import render_prompt
from nanorun.text.tokenizer import SPECIAL_TOKENS, Tokenizer


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return half_taught((Echo, Pick, Sum), steps=110)


@pytest.fixture(autouse=True)
def world(home, model, monkeypatch):
    """A home with the model as a run, and names for the small tasks."""
    monkeypatch.setattr(catalogue, "open_task", open_task)
    furnish(home, model)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield home
    torch.set_num_threads(before)


TASKS = ("echo", "pick", "sum")
FIGURES = ("chatcore", "chatcore_low", "chatcore_high", "tasks", "unjudged")


def figures(result):
    return {key: result[key] for key in FIGURES}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_checkpoint_twice_gives_the_same_numbers(world):
    for settings in (ReplySettings(max_tokens=12), ReplySettings(max_tokens=12, temperature=1.0, samples=3)):
        one, other = (evaluate_chat(ChatEvalOptions(tasks=TASKS, settings=settings)) for _ in range(2))
        assert figures(one) == figures(other)
        by_name = {row["task"]: row for row in one["tasks"]}
        assert by_name["pick"]["by"] == "letters"
        assert by_name["sum"]["by"] == "generation"
        assert all(row["n"] == 40 for row in by_name.values())
        assert 0 < by_name["echo"]["accuracy"] < 1
        assert (by_name["sum"]["pass"] is None) == (settings.samples == 1)


def test_batches_of_1_and_of_64_give_the_same_greedy_answers(world, model):
    for name in TASKS:
        task = open_task(name, "test")
        found = [
            generate_replies(
                model, byte_tokenizer(), name, task, range(40), ReplySettings(max_tokens=12, batch=batch)
            )
            for batch in (1, 3, 64)
        ]
        assert found[0] == found[1] == found[2]
        assert len({str(answer.reply) for answer in found[0]}) > 1
    assert any(part["type"] == "output" for answer in found[0] for part in answer.reply), "it calculated"


def test_samples_for_a_question_do_not_depend_on_other_questions(model):
    settings = ReplySettings(max_tokens=8, temperature=1.0, samples=2, seed=4)
    task, tokenizer = open_task("echo", "test"), byte_tokenizer()
    every = {
        (a.index, a.sample): a for a in generate_replies(model, tokenizer, "echo", task, range(40), settings)
    }
    few = generate_replies(model, tokenizer, "echo", task, [30, 7], settings)
    assert [(a.index, a.sample) for a in few] == [(30, 0), (30, 1), (7, 0), (7, 1)]
    assert all(every[answer.index, answer.sample] == answer for answer in few)
    other = generate_replies(model, tokenizer, "echo", task, range(40), ReplySettings(8, 1.0, 2, seed=5))
    assert list(every.values()) != other


def test_scores_are_means_centred_by_the_baseline(world):
    result = evaluate_chat(ChatEvalOptions(tasks=TASKS, settings=ReplySettings(max_tokens=12)))
    kept = lines(world / "runs" / "tiny-sft" / "chat-000007.jsonl")
    assert result["replies"].endswith("chat-000007.jsonl")
    assert kept[0]["model"] == "tiny-sft"
    centred = []
    for row, baseline in zip(result["tasks"], (1 / 8, 0.5, 0.0), strict=True):
        rewards = [line["reward"] for line in kept[1:] if line["task"] == row["task"]]
        assert len(rewards) == row["n"] == 40
        accuracy = sum(rewards) / 40
        assert row["accuracy"] == pytest.approx(accuracy)
        centred.append((accuracy - baseline) / (1 - baseline))
        assert row["centred"] == pytest.approx(centred[-1])
        assert row["low"] <= accuracy <= row["high"]
    assert result["chatcore"] == pytest.approx(sum(centred) / 3)
    assert result["chatcore_low"] < result["chatcore"] < result["chatcore_high"]
    shown = tables.chat_table(result)
    assert "ChatCORE" in shown
    assert "echo" in shown
    assert kept[1]["question"] == Echo("test").asked[0]
    assert kept[1]["reply"][0]["type"] == "text"


def test_wilson_intervals_match_published_values():
    for share, n, low, high in ((0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (0.9, 50, 0.7864, 0.9565)):
        assert wilson_interval(share, n) == pytest.approx((low, high), abs=1e-4)
    assert wilson_interval(1.0, 3)[1] == pytest.approx(1.0)
    dice = random.Random(1)
    inside = 0
    for _ in range(2000):
        right = sum(dice.random() < 0.8 for _ in range(60))
        low, high = wilson_interval(right / 60, 60)
        inside += low <= 0.8 <= high
    assert 0.93 < inside / 2000 < 0.97


def test_pass_at_k_is_the_probability_that_one_of_k_samples_is_correct():
    rewards = [[1.0, 0.0, 0.0, 1.0, 0.5, 0.0], [0.0] * 6, [1.0] * 6]
    found = pass_at_k(rewards)
    assert list(found) == ["1", "2", "4", "6"]
    for k, share in found.items():
        chances = [
            sum(max(draw) >= 1 for draw in itertools.combinations(mine, int(k))) / math.comb(6, int(k))
            for mine in rewards
        ]
        assert share == pytest.approx(sum(chances) / 3)


def test_a_limited_selection_covers_the_whole_task_and_never_changes():
    few = select_questions(1000, 50)
    assert few == select_questions(1000, 50)
    assert len(set(few)) == 50
    assert min(few) < 100 < 900 < max(few)
    assert set(few) < set(select_questions(1000, 200))
    assert select_questions(3, 50) == [0, 1, 2]


# -- letters -----------------------------------------------------------------------------------------


def test_letters_are_chosen_without_generating(world, monkeypatch):
    monkeypatch.setattr(replies, "Engine", lambda *_: pytest.fail("it was used"))
    result = evaluate_chat(ChatEvalOptions(tasks=["pick"], max_per_task=20))
    assert result["tasks"][0]["n"] == 20
    assert {line["reply"][0]["text"] for line in lines(world / "runs/tiny-sft/chat-000007.jsonl")[1:]} <= {
        "A",
        "B",
    }


def test_the_most_likely_letter_counts_all_its_tokens(model):
    """One token, two spellings of one, or several tokens: always what the whole distribution says."""
    tokenizer = byte_tokenizer()
    prompts = [
        render_prompt([{"role": "user", "content": text}], tokenizer) for text in ("ax", "b", "hz" * 3)
    ]

    def chance(prompt, answer):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logprobs = model.logits(tokens).log_softmax(-1)[0, len(prompt) - 1 : -1]
        return logprobs.gather(1, torch.tensor(answer)[:, None]).sum().item()

    letters = ["A", "B", "a", "1"]
    expected = [max(letters, key=lambda x, p=p: chance(p, tokenizer.encode(x))) for p in prompts]
    assert choose_letters(model, tokenizer, prompts, [letters] * 3) == expected

    words, end = ["yes", "no", "7", "aa"], [tokenizer.special["<|assistant_end|>"]]
    expected = [max(words, key=lambda x, p=p: chance(p, tokenizer.encode(x) + end)) for p in prompts]
    assert choose_letters(model, tokenizer, prompts, [words] * 3) == expected

    ranks = {bytes([b]): b for b in range(256) if b != 255} | {b" b": 255}  # a vocabulary with " b" in it
    spaced = Tokenizer(
        "spaced", r" ?\S+|\s+", ranks | {b"\xff": 256}, {n: 257 + i for i, n in enumerate(SPECIAL_TOKENS)}
    )
    assert replies._letter_tokens(spaced, "b") == [ord("b"), 255]
    assert replies._letter_tokens(spaced, "c") == [ord("c")]


def test_a_question_may_have_fewer_letters_than_others(model):
    class Uneven(Pick):
        def letters_of(self, index):
            return "A" if index % 2 else "B"

    answers = generate_replies(model, byte_tokenizer(), "uneven", Uneven("test"), range(6), ReplySettings())
    assert [answer.reply[0]["text"] for answer in answers] == list("BABABA")


def test_questions_longer_than_the_context_are_truncated_from_the_left(model):
    class Long(Echo):
        letters = None

        def __getitem__(self, index):
            return talk("x" * 100 + "a", "a")

    for letters in (None, "AB"):
        task = Long("test")
        task.letters = letters
        [answer] = generate_replies(model, byte_tokenizer(), "long", task, [0], ReplySettings(max_tokens=8))
        assert answer.reply
    prompt = replies.question_prompt(task[0], byte_tokenizer(), 32, 8)
    assert len(prompt) == 24
    assert prompt[0] == byte_tokenizer().bos
    assert byte_tokenizer().decode(prompt).endswith("a<|user_end|><|assistant_start|>")


# -- answering here, judging there -------------------------------------------------------------------


def test_replies_are_saved_on_one_machine_and_graded_on_another(world, tmp_path, monkeypatch, capsys):
    tasks = ("echo", "sandboxed", "pick")
    whole = evaluate_chat(ChatEvalOptions(tasks=tasks, settings=ReplySettings(max_tokens=8)))
    monkeypatch.setattr(Sandboxed, "here", False)
    with pytest.raises(UserError, match="--keep FILE"):
        evaluate_chat(ChatEvalOptions(tasks=tasks, settings=ReplySettings(max_tokens=8)))
    file = tmp_path / "answers.jsonl"
    kept = evaluate_chat(
        ChatEvalOptions(tasks=tasks, settings=ReplySettings(max_tokens=8), replies_file=file)
    )
    assert "sandboxed is not graded yet" in capsys.readouterr().err
    assert kept["unjudged"] == ["sandboxed"]
    assert kept["chatcore"] is None
    assert "--judge" in tables.chat_table(kept)
    rewards = {line["task"]: line["reward"] for line in lines(file)[1:]}
    assert rewards["sandboxed"] is None
    assert rewards["echo"] is not None
    before = file.read_bytes()
    monkeypatch.setattr(Sandboxed, "here", True)
    judged = grade_file(file)
    assert figures(judged) == figures(whole)
    assert (judged["model"], judged["step"]) == ("tiny-sft", 7)
    assert file.read_bytes() == before
    assert all(line["reward"] is not None for line in lines(tmp_path / "answers-judged.jsonl")[1:])


def test_replies_to_other_questions_are_not_graded(world, tmp_path, monkeypatch):
    file = tmp_path / "answers.jsonl"
    evaluate_chat(ChatEvalOptions(tasks=["echo"], max_per_task=5, replies_file=file))
    monkeypatch.setattr(Echo, "ask", staticmethod(lambda dice: "zz"))
    with pytest.raises(UserError, match="differs here"):
        grade_file(file)


def test_a_file_cannot_run_code_that_the_user_did_not_name(world, tmp_path):
    file, code = tmp_path / "answers.jsonl", f"{HERE}:Echo"
    kept = evaluate_chat(ChatEvalOptions(tasks=[code], max_per_task=5, replies_file=file))
    with pytest.raises(UserError, match=f"add --tasks {code}"):
        grade_file(file)
    assert figures(grade_file(file, [code])) == figures(kept)


@pytest.mark.parametrize(
    "text", ["", "no json", '{"format": "other"}', "[1]", '{"format": "nanorun-replies"}\n{}']
)
def test_an_invalid_file_of_replies_is_a_user_error(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match="is not what eval chat --keep writes"):
        grade_file(tmp_path / "file")


@pytest.mark.parametrize("reward", [1.5, -0.1, float("nan")])
def test_a_reward_out_of_bounds_is_a_user_error(world, monkeypatch, reward):
    monkeypatch.setattr(Echo, "reward", lambda *_: reward)
    with pytest.raises(UserError, match="from 0 to 1"):
        evaluate_chat(ChatEvalOptions(tasks=["echo"], max_per_task=2))


# -- the command line --------------------------------------------------------------------------------


def test_the_command_line_prints_a_table_or_a_record(world, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = ["eval", "chat", "--tasks", "echo,pick", "--max-per-task", "8", "--max-tokens", "8"]
    with pytest.raises(SystemExit) as left:
        cli.main([*args, "--samples", "4", "--json"])
    assert left.value.code == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["what"] == "chat"
    assert result["temperature"] == 1.0
    assert list(result["tasks"][0]["pass"]) == ["1", "2", "4"]
    assert result["tasks"][1]["pass"] is None
    with pytest.raises(SystemExit):
        cli.main(args)
    assert "ChatCORE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nobody"], "no run 'nobody'"),
        (["--judge", "nowhere.jsonl"], "Cannot read"),
        (["--judge", "a.jsonl", "--model", "tiny-sft"], "leave the others out"),
        (["--samples", "4", "--temperature", "0"], "the same every time"),
        (["--max-per-task", "0"], "--max-per-task"),
        (["--tasks", "echo", "--keep", "/nowhere/file"], "cannot be written"),
    ],
)
def test_a_user_error_is_one_sentence_with_exit_code_2(world, args, words, mistake):
    assert words in mistake(["eval", "chat", *args])


def test_missing_tasks_of_chatcore_are_left_out(world, monkeypatch, capsys):
    monkeypatch.setattr(chat, "SAMPLE_TASKS", ("echo", "absent", "pick"))

    def some(spec, split, *_):
        if spec == "absent":
            raise UserError("Its files are not here.")
        return open_task(spec, split)

    monkeypatch.setattr(catalogue, "open_task", some)
    result = evaluate_chat(ChatEvalOptions(max_per_task=4))
    assert [row["task"] for row in result["tasks"]] == ["echo", "pick"]
    assert "left out: Its files are not here." in capsys.readouterr().err
    monkeypatch.setattr(chat, "SAMPLE_TASKS", ("absent",))
    with pytest.raises(UserError, match="not here"):
        evaluate_chat(ChatEvalOptions())


def test_seeds_leave_room_for_the_samples_of_a_request():
    assert all(0 <= derive_seed(a, "x", b) < 2**61 for a in range(50) for b in range(50))
    assert len({derive_seed(0, "x", b) for b in range(1000)}) == 1000
