"""Fixtures for all tests: an empty home, small trained models, and the shared corpus where this machine has it."""

import os
import signal
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: as the command line does

from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: without a GPU its kernels run on the CPU

import pytest

# A process started in the background (`make test &`) ignores SIGINT, and so would all its child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(
    os.environ.get("NANORUN_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty NANORUN_HOME."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("NANORUN_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two small models that memorized their replies. Read-only: tests share it."""
    import torch
    from talkers import make_home

    folder = tmp_path_factory.mktemp("talkers")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    make_home(folder)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[str]], str]:
    """Runs an invalid command in this process, checks exit code 2 and a one-line message, and returns the message."""
    from nanorun import cli

    def run(args: Sequence[str]) -> str:
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as exit_info:
            cli.main(list(args))
        output = capsys.readouterr()
        assert exit_info.value.code == 2
        assert output.out == ""
        assert len(output.err.strip().splitlines()) == 1
        return output.err

    return run


@pytest.fixture
def shared_data() -> Path:
    """The real corpus, which is not part of the repository."""
    if not (SHARED_DATA / "pretrain").is_dir():
        pytest.skip(f"no shared corpus at {SHARED_DATA} (set NANORUN_SHARED_DATA to its folder)")
    return SHARED_DATA
