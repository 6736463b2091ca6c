"""`nanorun chat` as people and scripts use it: real processes, in pipes and in a real (pseudo-)terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import readline
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from talkers import CONTEXT, EVIL, HI, STORY, byte_tokenizer

from nanorun.chat.conversation import ChatOptions, Dialogue
from nanorun.chat.screen import Wrap, cells
from nanorun.console import visible
from nanorun.infer.engine import Settings
from nanorun.infer.load import ServedModel
from nanorun.infer.request import Sampling
from nanorun.text.chat import render
from nanorun.tools.sandbox import Sandbox, SandboxUnavailable

ROOT = Path(__file__).resolve().parents[1]
GREEDY = ("--temperature", "0")


@pytest.fixture
def talkers(trained: Path, home: Path) -> Path:
    """A copy of the home with both models."""
    shutil.copytree(trained, home, dirs_exist_ok=True)
    return home


def chat(
    home: Path, *args: str, stdin: str | bytes = b"", code: int = 0
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "nanorun", "chat", *args],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "NANORUN_HOME": str(home)},
        timeout=120,
    )
    assert done.returncode == code, done.stderr.decode() + done.stdout.decode()
    assert b"Traceback" not in done.stderr
    return done


def chat_all(home: Path, *commands: tuple[list[str], str | bytes], code: int = 0) -> list[Any]:
    """Several at a time, since most of the time is their start."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda c: chat(home, *c[0], stdin=c[1], code=code), commands))


# -- one question ------------------------------------------------------------------------------------


def test_a_question_gets_its_answer_on_stdout_and_nothing_else(trained):
    ways = ((["-p", "hi", *GREEDY], ""), ([*GREEDY], "hi\n"), (["-p", "-", *GREEDY], "hi"))
    for done in chat_all(trained, *ways):
        assert done.stdout.decode() == HI + "\n"
        assert done.stderr == b"answering: 'talker' (chat model)\n"
    assert chat(trained, "-p", "hi", "--model", "talker", *GREEDY).stderr == b"", "named, it is obvious"


def test_json_describes_one_answer(trained):
    done = chat(trained, "-p", "sum", "--json", "--seed", "7", *GREEDY)
    record = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    assert record["text"] == "Let me see: Quite so."
    assert [(part["type"], part["text"]) for part in record["parts"]] == [
        ("text", "Let me see: "),
        ("python", "12+30"),
        ("output", "42"),
        ("text", " Quite so."),
    ]
    assert (record["finish"], record["model"], record["kind"], record["seed"]) == ("stop", "talker", "sft", 7)
    assert record["tokens"] == len("Let me see: 12+30 Quite so.") + 3, "tool output is not counted"
    assert record["tokens_per_s"] > 0
    assert 0 < record["first_token_s"] < 10


def test_a_pipe_gets_the_unchanged_text_with_tool_calls_in_brackets(trained):
    assert chat(trained, "-p", "evil", *GREEDY).stdout.decode() == EVIL + "\n"
    assert chat(trained, "-p", "sum", *GREEDY).stdout == b"Let me see: [12+30 = 42] Quite so.\n"


def test_int8_and_speculation_give_the_same_answer(trained):
    fast = ["-p", "hi", "--int8", "--speculate", "draft", "--draft", "talker"]
    assert chat(trained, *fast, *GREEDY).stdout.decode() == HI + "\n"


def test_a_seed_reproduces_answers_and_each_answer_has_its_own(talkers):
    with ServedModel(settings=Settings(speculate="lookup")) as model:

        def say(seed: int, questions: str) -> list[str]:
            dialogue = Dialogue(
                model, ChatOptions(sampling=Sampling(temperature=5, seed=seed), max_tokens=20)
            )
            answers = [dialogue.ask(question) for question in questions]
            return ["".join(text for _, text in answer) for answer in answers]

        assert say(1, "aa") == say(1, "aa")
        assert len({*say(1, "aa"), *say(3, "aa")}) == 4


def test_a_base_model_continues_the_text_and_says_so_on_stderr(trained):
    done = chat(trained, "-p", "Once", "--model", "writer", *GREEDY)
    assert done.stdout.decode() == (STORY * 3).removeprefix("Once") + "\n"
    assert done.stderr.decode() == "'writer' is a base model: it continues the text.\n"


def test_a_base_model_that_was_trained_last_answers_and_says_so(talkers):
    config = talkers / "runs" / "talker" / "config.json"
    config.write_text(config.read_text())  # writing a file trains nothing
    newest = next((talkers / "runs" / "writer" / "checkpoints").glob("0*"))
    os.utime(newest, (time.time() + 60,) * 2)
    done = chat(talkers, "-p", "Once", *GREEDY)
    assert done.stdout.decode() == (STORY * 3).removeprefix("Once") + "\n"
    assert done.stderr == b"answering: 'writer' (base model: continues text)\n"


def test_a_damaged_model_is_skipped_and_named(talkers):
    for weights in talkers.glob("runs/talker/checkpoints/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-9])
    done = chat(talkers, "-p", "Once", *GREEDY)
    assert done.stdout.decode() == (STORY * 3).removeprefix("Once") + "\n"
    assert "skipping the run 'talker'" in done.stderr.decode()


def test_tool_output_depends_on_the_allowed_tools(trained):
    def said(*tools: str) -> str:
        parts = json.loads(chat(trained, "-p", "program", "--json", *GREEDY, *tools).stdout)["parts"]
        assert parts[1] == {"type": "python", "text": "print(6*7)"}
        return parts[2]["text"]

    assert said() == "error: not an expression the calculator knows"
    assert said("--tools", "none") == "42", "made up by the model"
    try:
        Sandbox.probe()
    except SandboxUnavailable as unavailable:
        pytest.skip(str(unavailable))
    assert said("--tools", "python") == "42"


MISTAKES = [
    (["-p", "hi", "--model", "nobody"], "", "There is no run 'nobody'"),
    (["-p", "x" * CONTEXT], "", "the model's context is 2,048"),
    (["-p", "x" * CONTEXT, "--model", "writer"], "", "the model's context is 2,048"),
    (["-p", " "], "", "There is no question"),
    ([], "\n", "stdin is empty"),
    ([], b"caf\xe9", "is not valid UTF-8"),
    (["-p", "hi", "--temperature", "-1"], "", "temperature is -1.0"),
    (["-p", "hi", "--tools", "hammer"], "", "'hammer' is not one of 'calculator', 'python', 'none'"),
    (["-p", "hi", "--speculate", "draft"], "", "--draft"),
    (["-p", "hi", "--model", "writer", "--system", "x"], "", "leave out --system"),
]


def test_a_user_error_is_one_sentence_with_exit_code_2(trained):
    done = chat_all(trained, *((args, stdin) for args, stdin, _ in MISTAKES), code=2)
    for (args, _, words), one in zip(MISTAKES, done, strict=True):
        assert one.stdout == b"", args
        assert len(one.stderr.splitlines()) == 1, args
        assert words in one.stderr.decode(), args


def test_a_missing_model_or_sandbox_is_reported_with_a_remedy(trained, home, tmp_path, monkeypatch):
    assert b"There is no trained model" in chat(home, "-p", "hi", code=2).stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = chat(trained, "-p", "hi", "--tools", "python", code=2).stderr.decode()
    assert "cannot be run safely here: bubblewrap is not installed" in refused
    assert len(refused.splitlines()) == 1


def test_the_next_turn_prefills_only_new_tokens_and_truncation_keeps_the_system_message(talkers):
    with ServedModel() as model:
        dialogue = Dialogue(
            model, ChatOptions(sampling=Sampling(temperature=0), max_tokens=40, system="S" * 100)
        )
        for question in ("hi", "sum"):
            *_, (kind, _) = pieces = list(dialogue.ask(question))
            assert (kind, len(pieces) > 5) == ("text", True)
        answer = dialogue.ask("hi")
        list(answer)
        new = model.engine.stats.prefilled_tokens
        assert answer.reply.reused_tokens > 150
        assert answer.reply.prompt_tokens - answer.reply.reused_tokens < 10
        assert not dialogue.truncated
        for letter in "abc":
            answer = dialogue.ask(letter * 900)
            list(answer)
        assert dialogue.truncated
        assert model.tokenizer.decode(answer.request.prompt).count("S") == 100
        assert model.engine.stats.prefilled_tokens > new
        assert len(dialogue.turns) >= 5, "nothing of it is lost"


# -- a terminal --------------------------------------------------------------------------------------

PROMPT = re.compile(rb"(?:^|\r\n)(?:\x1b\[1m)?>(?:\x1b\[0m)? $")
PASTE_MODE = re.compile(rb"\x1b\[\?2004(?:h|l\r)")  # bracketed paste on and off
DIRECTIONS = "LRE RLE PDF LRO RLO LRI RLI FSI PDI".split()  # bidirectional controls
# A process whose terminal is its stdin, so that Ctrl-C typed there is a signal for it.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """`nanorun chat` in its own terminal, with methods to type there."""

    def __init__(self, home: Path, *args: str, **environment: str) -> None:
        self.marks_pastes = False
        self.fd, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 5000, 0, 0))
        env = {**os.environ, "NANORUN_HOME": str(home), "INPUTRC": os.devnull, "PYTHONPATH": str(ROOT)}
        env |= {"TERM": "xterm-256color", "NO_COLOR": "1", **environment}
        program = [sys.executable, "-m", "nanorun", "chat", *args]
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *program],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=home,
            env=env,
            start_new_session=True,
        )
        os.close(inside)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, pattern: str | re.Pattern[bytes], seconds: float = 60) -> bytes:
        """The output until the pattern appears, without the switches of bracketed paste."""
        wanted = re.compile(re.escape(pattern.encode())) if isinstance(pattern, str) else pattern
        came, deadline = b"", time.monotonic() + seconds
        while not wanted.search(came):
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted.pattern!r} did not appear: {came!r}"
            if select.select([self.fd], [], [], left)[0]:
                came += os.read(self.fd, 65_536)
                self.marks_pastes |= b"\x1b[?2004h" in came
                came = PASTE_MODE.sub(b"", came)
        return came

    def say(self, line: str) -> str:
        """Types a line; returns the output until the next prompt."""
        self.type(line + "\r")
        came = self.until(PROMPT)
        return PROMPT.sub(b"", came).decode().replace("\r\n", "\n").removeprefix(line).strip("\n")

    def press(self, key: str) -> None:
        """After a pause: just before it reads a line, Python misses a signal."""
        time.sleep(0.3)
        self.type(key)

    def end(self, keys: str = "\x04") -> int:
        self.press(keys)
        return self.wait()

    def wait(self) -> int:
        with contextlib.suppress(OSError):  # the process has exited
            while select.select([self.fd], [], [], 60)[0] and os.read(self.fd, 65_536):
                pass
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@contextlib.contextmanager
def terminal(home: Path, *args: str, **environment: str) -> Iterator[Terminal]:
    session = Terminal(home, *args, **environment)
    try:
        yield session
    finally:
        session.close()


def test_answers_stream_and_ctrl_c_stops_only_the_answer(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "2000") as session:
        assert b"talker: " in session.until(PROMPT)
        session.type("loop\r")
        for _ in range(3):  # it arrives in pieces
            session.until("tick tock tick")
        session.type("\x03")
        stopped = session.until(PROMPT)
        assert b"Stopped; the text so far is kept." in stopped
        assert session.process.poll() is None
        assert session.say("hi"), (
            "the next question works, whatever a tiny model makes of it after half an answer"
        )
        saved = talkers / "talk.jsonl"
        assert session.say(f"/save {saved}") == f"Saved to {saved}."
        (conversation,) = map(json.loads, saved.read_text("utf-8").splitlines())
        said = [message["content"] for message in conversation["messages"]]
        assert said[0] == "loop"
        assert said[1].startswith("tick tock tick tock")
        assert len(said[1]) < 1900, "the partial answer"
        assert said[2] == "hi"
        assert len(said) == 4
        assert session.end() == 0


def test_control_sequences_of_an_answer_do_not_reach_the_terminal(talkers):
    with terminal(talkers, *GREEDY, NO_COLOR="") as session:
        session.until(PROMPT)
        assert session.say("evil") == "x^[[31mred^[]0;owned^G ^MY<U+009B>2J <U+202E>z"
        assert session.say("sum") == "Let me see: \x1b[2m[12+30 = 42]\x1b[0m Quite so.", "the call is dim"
        assert session.say("half") == "ab", "an incomplete character is dropped"
        assert session.say("hi") == HI
        assert session.end("/quit\r") == 0


def test_control_characters_are_escaped():
    for character in map(chr, range(0x3000)):
        obeyed = unicodedata.category(character) == "Cc" or unicodedata.bidirectional(character) in DIRECTIONS
        if obeyed and character not in "\n\t":
            assert visible(character).isascii()
            assert visible(character).isprintable()
        else:
            assert visible(character) == character


def test_streamed_lines_wrap_between_words():
    text = "one two three four\n  five six-seven  eight nine ten"
    for size in (1, 2, 7, 100):
        wrap = Wrap(10)
        shown = "".join(wrap.feed(text[i : i + size]) for i in range(0, len(text), size)) + wrap.rest()
        assert shown.split() == text.split()
        assert all(cells(line) <= 10 for line in shown.splitlines())
        assert shown.startswith("one two\nthree four\n  five\nsix-seven")
    assert Wrap(0).feed(text) == text
    wrap = Wrap(10)
    assert wrap.feed("一" * 40)[:12] == "一" * 12, "a long word is released early"
    assert Wrap(40).feed("held back") == "held", "a word is held back until it is complete"


def test_a_narrow_terminal_breaks_no_word(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "60") as session:
        session.until(PROMPT)
        fcntl.ioctl(session.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 23, 0, 0))
        session.type("loop\r")
        came = session.until("Truncated:").decode().splitlines()  # readline may redraw its prompt
        assert [line.rstrip() for line in came if "tick" in line] == ["tick tock tick tock"] * 3


def test_help_for_a_base_model_lists_only_its_commands(talkers):
    with terminal(talkers, "--model", "writer") as session:
        session.until(PROMPT)
        listed = session.say("/help")
        assert "/system" not in listed
        assert "/load" not in listed
        assert "/save [FILE]" in listed


def test_commands_and_the_files_they_write(talkers):
    with terminal(talkers, "--temperature", "5", "--max-tokens", "30", "--verbose") as session:
        session.until(PROMPT)
        assert "There is nothing to save yet." in session.say("/save")
        lively = session.say("hi")
        assert HI not in lively
        assert re.search(r"\d+ tokens?, [\d,]+ tokens/s, first after [\d,]+ ms$", lively)
        assert session.say("/verbose") == "verbose: off"
        assert session.say("/temperature 0") == "temperature: 0.0"
        assert session.say("/retry") == HI
        assert session.say("/reset") == "Started a new conversation."
        assert [session.say("hi"), session.say("/retry")] == [HI, HI], "greedy sampling is deterministic"
        for mistake, words in (
            ("/temp 1", "did you mean /temperature?"),
            ("/dance", "Unknown command /dance: /help lists the commands"),
            ("/temperature warm", "temperature is 'warm': it must be a number."),
            ("/temperature -1", "temperature is -1.0: it must be"),
            ("/top_k 1.5", "it must be an integer"),
            ("/max_tokens 0", "it must be at least 1"),
            ("/save /nowhere/at/all", "cannot be written (No such file or directory)"),
            ("/save .chat_history", ".chat_history already exists"),
            ("/load nothing", "cannot be read"),
            ("/load .chat_history", "does not contain one conversation"),
            ("x" * CONTEXT, "shorten the prompt"),
        ):
            assert words in session.say(mistake)
        assert session.say("/seed 7") == "seed: 7"
        assert session.say("/max_tokens") == "max_tokens: 30"
        assert session.say("/system Be kind.") == "system: Be kind."
        assert "/temperature X" in session.say("/help")
        assert session.say("/save kept.jsonl") == "Saved to kept.jsonl."
        assert session.say("/reset") == "Started a new conversation."
        assert "There is no question to answer again" in session.say("/retry")
        assert "1 question and answer" in session.say("/load kept.jsonl")
        assert session.say("/system") == "system: Be kind."
        assert session.say("/system off") == "There is no system message."
        session.type("half a lin")
        session.press("\x03")
        assert b"Press Ctrl-C again or Ctrl-D to exit." in session.until(PROMPT)
        assert session.end("\x03") == 0
    record = json.loads((talkers / "kept.jsonl").read_text("utf-8"))
    assert [message["content"] for message in record["messages"]] == ["Be kind.", "hi", HI]
    assert render(record, byte_tokenizer()).dropped == 0, "valid chat data"
    kept = talkers / ".chat_history"
    assert kept.read_text().splitlines()[:4] == ["/save", "hi", "/verbose", "/temperature 0"]
    assert kept.stat().st_mode & 0o777 == 0o600


def messages_of(session: Terminal, file: Path) -> list[str]:
    """The user's messages so far."""
    assert session.say(f"/save {file}") == f"Saved to {file}."
    (conversation,) = map(json.loads, file.read_text("utf-8").splitlines())
    return [message["content"] for message in conversation["messages"] if message["role"] == "user"]


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste")
def test_a_bracketed_paste_is_one_message(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "5") as session:
        session.until(PROMPT)
        assert session.marks_pastes
        session.type("\x1b[200~// a paste\r\rwith an end\r\x1b[201~")
        session.press("\r")
        session.until(PROMPT)
        assert messages_of(session, talkers / "talk.jsonl") == ["// a paste\n\nwith an end"]


def test_pasted_lines_are_one_message_in_a_terminal_that_does_not_mark_them(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "5") as session:
        session.until(PROMPT)
        session.say("/max_tokens 6\r/not a command\rlast line")
        session.say("another message")
        said = ["/max_tokens 6\n/not a command\nlast line", "another message"]
        assert messages_of(session, talkers / "talk.jsonl") == said


def test_a_backslash_continues_a_message_on_the_next_line(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "5") as session:
        session.until(PROMPT)
        session.type("one\\\r")
        session.until("... ")
        session.type("two\\\r")
        session.until("... ")
        session.say("three")
        assert messages_of(session, talkers / "talk.jsonl") == ["one\ntwo\nthree"]
        assert "backslash" in session.say("/help")


def test_lines_typed_during_an_answer_remain_messages_of_their_own(talkers):
    with terminal(talkers, *GREEDY, "--max-tokens", "300") as session:
        session.until(PROMPT)
        session.type("loop\r")
        session.until("tick tock")
        session.type("hi\rsum\r")
        session.until(re.compile(rb"\n> hi\r\n.*\n> sum\r\n.*\n> $", re.DOTALL))
        assert messages_of(session, talkers / "talk.jsonl") == ["loop", "hi", "sum"]


def test_the_arrow_keys_recall_the_input_history(talkers):
    (talkers / ".chat_history").write_text("old\n" * 3000 + "hi\n")
    with terminal(talkers, *GREEDY) as session:
        session.until(PROMPT)
        assert session.say("\x1b[A").endswith(HI)
        assert session.say("/verbose") == "verbose: on"
        assert session.end() == 0
    lines = (talkers / ".chat_history").read_text().splitlines()
    assert lines[-2:] == ["hi", "/verbose"]
    assert len(lines) == 1001, "its size is bounded"


def test_a_conversation_that_exceeds_the_context_says_so_once_and_continues(talkers):
    words = "its oldest part is left out"
    with terminal(talkers, *GREEDY, "--max-tokens", "5") as session:
        session.until(PROMPT)
        assert words not in session.say("a" * 1000)
        assert sum(words in session.say(letter * 1000) for letter in "bcdef") == 1
        assert session.say("/reset") == "Started a new conversation."
        assert session.say("hi").startswith(HI[:3])
        time.sleep(0.3)
        session.process.send_signal(signal.SIGTERM)
        assert session.wait() == 128 + signal.SIGTERM


def test_a_base_model_in_a_terminal_continues_a_text(talkers):
    with terminal(talkers, *GREEDY, "--model", "writer", "--max-tokens", "30") as session:
        assert b"it continues the text that you type" in session.until(PROMPT)
        first = session.say("Once").splitlines()
        assert first[0].startswith("Once a 灯 lit the isle.")
        assert "the limit is 30 tokens" in first[1]
        whole = first[0] + session.say("").splitlines()[0]
        assert (STORY * 2).startswith(whole)
        assert session.say("/retry").splitlines()[0] == whole, "greedy sampling is deterministic"
        session.say("/max_tokens 200")
        assert session.say("") == (STORY * 3).removeprefix(whole)
        assert session.say("").startswith("The text has ended. Starting another one:\nOnce a")
        assert "does not support a system message" in session.say("/system x")
        assert session.say("/save texts.jsonl") == "Saved to texts.jsonl."
        assert session.end() == 0
    texts = [json.loads(line)["text"] for line in (talkers / "texts.jsonl").read_text("utf-8").splitlines()]
    assert texts == [STORY * 3] * 2


def test_an_output_without_a_tool_is_marked_as_made_up(talkers):
    with terminal(talkers, *GREEDY, "--tools", "none") as session:
        session.until(PROMPT)
        assert session.say("program") == "Running [print(6*7) = 42 (made up)] Done."
        assert session.end() == 0


def test_json_needs_a_question(talkers):
    with terminal(talkers, "--json") as session:
        session.until("--json answers one question: give it with -p, or on stdin.")
        assert session.wait() == 2
