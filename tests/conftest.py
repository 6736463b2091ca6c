"""Fixtures that every test may use: a fresh home, and the shared corpus where this machine has it."""

import os
import signal
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: as the command line does

from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: without a GPU its kernels run on the CPU

import pytest

# Started in the background, as by `make test &`, a process ignores Ctrl-C, and so would all that the tests start.
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
    """A home with two small models that know what they say by heart: nobody changes it."""
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
    """Types a command that is wrong, in this process: exit code 2 and one sentence, which is returned."""
    from nanorun import cli

    def typed(args: Sequence[str]) -> str:
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as left:
            cli.main(list(args))
        said = capsys.readouterr()
        assert left.value.code == 2
        assert said.out == ""
        assert len(said.err.strip().splitlines()) == 1
        return said.err

    return typed


@pytest.fixture
def shared_data() -> Path:
    """The real corpus, which is never part of the repository."""
    if not (SHARED_DATA / "pretrain").is_dir():
        pytest.skip(f"no shared corpus at {SHARED_DATA} (set NANORUN_SHARED_DATA to its folder)")
    return SHARED_DATA
