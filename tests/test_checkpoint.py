"""A checkpoint that exists is whole; what is damaged is noticed; a failure takes nothing with it."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanorun import checkpoint
from nanorun.checkpoint import Damaged, NonFinite, load, load_newest, prune, save, steps
from nanorun.errors import UserError

ROOT = Path(__file__).parents[1]

# Forks a writer that saves (and prunes) without end, kills it at a random moment, and looks at what is
# there. One process imports torch, its forks are the ones that die. Arguments: folder, rounds, seed.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from nanorun import checkpoint
torch.set_num_threads(1)
folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
weights = lambda step: torch.full((300, 300), float(step))
for _ in range(rounds):
    done, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = checkpoint.load_newest(folder)
        step = found.step if found else 0
        while True:
            step += 1
            for again in range(2):  # the second replaces the first
                checkpoint.save(folder, step, {"w": weights(step)}, {"m": weights(-step)}, {"s": step})
                os.write(write, step.to_bytes(4, "little"))
            checkpoint.prune(folder, keep=2)
    os.close(write)
    time.sleep(0.02 + chance.random() * 0.25)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledged = 0
    while number := os.read(done, 4):
        acknowledged = int.from_bytes(number, "little")
    os.close(done)
    for step in checkpoint.steps(folder):
        found = checkpoint.load(folder / f"{step:06d}")  # raises if anything under a real name is not whole
        assert found.step == found.state["s"] == step
        assert torch.equal(found.model["w"], weights(step)) and torch.equal(found.optimizer["m"], weights(-step))
    found = checkpoint.load_newest(folder, print)
    newest = found.step if found else 0
    assert acknowledged <= newest <= acknowledged + 1 or acknowledged == 0, (acknowledged, newest)
    assert not any(entry.startswith(".") for entry in os.listdir(folder)), os.listdir(folder)
    print(newest, flush=True)
"""


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"b.weight": torch.randn(30, 40), "a.bias": torch.randn(5).bfloat16(), "scalar": torch.tensor(1.5)}


def save_steps(folder: Path, *which: int) -> None:
    for step in which:
        save(folder, step, tensors(step), {"m": torch.full((3,), float(step))}, {"step": step})


def newest_step(folder: Path) -> int:
    found = load_newest(folder, lambda line: None)
    assert found is not None
    return found.step


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_loading_returns_what_was_saved(tmp_path):
    state = {"loader": {"position": [1, 2]}, "rate": 0.1 + 0.2, "best": float("inf"), "none": None}
    path = save(tmp_path, 60, tensors(), {"m": torch.arange(3)}, state)
    assert path == tmp_path / "000060"
    assert sorted(os.listdir(path)) == [
        "checksums.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    found = load(path)
    assert (found.step, found.path, found.state) == (60, path, state)
    assert same(found.model, tensors())
    assert same(found.optimizer, {"m": torch.arange(3)})
    assert os.listdir(tmp_path) == ["000060"]


def test_every_dtype_and_odd_shape_survives_and_the_library_reads_it(tmp_path):
    many = {str(dtype): torch.ones(3, 5).to(dtype) for dtype in checkpoint._DTYPES}
    many |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(7), "ü": torch.arange(6)}
    many |= {"turned": torch.arange(12.0).reshape(3, 4).T, "every other": torch.arange(10.0)[::2]}
    path = save(tmp_path, 1, many, {}, {})
    found = load(path)
    assert found.optimizer == {}
    assert found.model.keys() == many.keys()
    for name, tensor in many.items():
        assert found.model[name].dtype == tensor.dtype
        assert found.model[name].shape == tensor.shape
        wide = tensor.double() if tensor.is_floating_point() else tensor.long()
        assert torch.equal(found.model[name].to(wide.dtype), wide)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("turned").get_shape() == [4, 3]


def test_loaded_tensors_can_be_written_to_without_touching_the_file(tmp_path):
    path = save(tmp_path, 1, tensors(), {}, {})
    load(path).model["b.weight"].zero_()
    assert same(load(path).model, tensors())


def test_tied_weights_are_loaded_under_both_names(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 4))
    found = load(save(tmp_path, 1, {"wte": weight, "head": weight, "part": weight[1:]}, {}, {}))
    assert same(found.model, {"wte": weight.data, "head": weight.data, "part": weight.data[1:]})


def test_equal_states_write_equal_bytes(tmp_path):
    save_steps(tmp_path / "a", 5)
    save_steps(tmp_path / "b", 5)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_saving_a_step_again_replaces_it(tmp_path):
    save_steps(tmp_path, 5)
    save(tmp_path, 5, tensors(99), {}, {"new": True})
    found = load(tmp_path / "000005")
    assert found.state == {"new": True}
    assert same(found.model, tensors(99))
    assert os.listdir(tmp_path) == ["000005"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, value, dtype):
    save_steps(tmp_path, 5)
    before = contents(tmp_path)
    broken = tensors()
    broken["b.weight"][17, 3] = value
    broken["b.weight"] = broken["b.weight"].to(dtype)
    for step in (5, 6):
        with pytest.raises(NonFinite, match=r"b\.weight of the model.*\(1 of 1,200, the first in row 17\)"):
            save(tmp_path, step, broken, {}, {})
        with pytest.raises(NonFinite, match=r"b\.weight of the optimizer"):
            save(tmp_path, step, tensors(), broken, {})
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["000005"]


def test_a_checkpoint_with_nan_is_damaged_even_if_its_checksums_are_right(tmp_path):
    save_steps(tmp_path, 5, 6)
    broken = tensors()
    broken["b.weight"][17, 3] = float("nan")
    newest = tmp_path / "000006"
    save_file(broken, newest / "model.safetensors")
    content = (newest / "model.safetensors").read_bytes()
    sums = json.loads((newest / "checksums.json").read_text())
    sums["files"]["model.safetensors"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (newest / "checksums.json").write_text(json.dumps(sums))
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 5
    assert "000006 is damaged (b.weight of the model holds NaN" in said[0]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {3: 1}}, "state.a"),
        ({"a": [torch.ones(2)]}, r"state\.a\[0\]"),
        ({"a": {"b": {1}}}, "state.a.b"),
    ],
)
def test_state_that_json_would_change_is_rejected_before_writing(tmp_path, state, where):
    with pytest.raises(TypeError, match=where):
        save(tmp_path, 1, tensors(), {}, state)
    assert os.listdir(tmp_path) == []


def test_a_folder_without_checkpoints_loads_none(tmp_path):
    assert load_newest(tmp_path / "missing") is None
    assert load_newest(tmp_path) is None
    (tmp_path / ".000007.writing-x-1").mkdir()
    assert load_newest(tmp_path) is None
    assert os.listdir(tmp_path) == []


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 12)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.CHECKSUMS])
@pytest.mark.parametrize(
    ("harm", "reason"), [(truncate, "12 bytes short"), (flip, "not match"), (Path.unlink, "is missing")]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, name, harm, reason):
    folder = tmp_path / "checkpoints"
    save_steps(folder, 20, 40, 60)
    harm(folder / "000060" / name)
    with pytest.raises(Damaged):
        load(folder / "000060")
    messages: list[str] = []
    found = load_newest(folder, messages.append, repair=False)
    assert found is not None
    assert sorted(os.listdir(folder)) == ["000020", "000040", "000060"], "a reader changes nothing"
    found = load_newest(folder, messages.append)
    assert found is not None
    assert found.step == 40
    assert messages[0] == messages[1]
    assert messages[0].startswith("checkpoints/000060 is damaged (")
    assert messages[0].endswith("): continuing from 000040")
    if name != checkpoint.CHECKSUMS or harm is Path.unlink:
        assert f"({name} " in messages[0]
        assert reason in messages[0]
    assert sorted(os.listdir(folder)) == ["000020", "000040", "damaged-000060"]
    save_steps(folder, 60)
    harm(folder / "000060" / name)
    load_newest(folder, messages.append)
    assert (folder / "damaged-000060-2").is_dir(), "an earlier damaged one is not overwritten"


def test_any_flipped_bit_is_detected(tmp_path):
    save_steps(tmp_path, 20)
    chance = random.Random(0)
    for name in (*checkpoint.FILES, checkpoint.CHECKSUMS):
        path = tmp_path / "000020" / name
        good = path.read_bytes()
        for _ in range(40):
            data = bytearray(good)
            where = chance.randrange(len(data))
            data[where] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            try:
                found = load(tmp_path / "000020")
            except Damaged:
                continue
            assert name == checkpoint.CHECKSUMS, f"{name}, byte {where}"  # such as a blank become a tab
            assert same(found.model, tensors(20))
        path.write_bytes(good)


def test_training_does_not_start_over_silently_if_all_checkpoints_are_damaged(tmp_path):
    save_steps(tmp_path, 20, 40)
    flip(tmp_path / "000020" / "state.json")
    truncate(tmp_path / "000040" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            load_newest(tmp_path)
        assert "000040: model.safetensors is 12 bytes short" in str(refused.value)
        assert "000020: state.json does not match its checksum" in str(refused.value)
        assert "--fresh" in str(refused.value)
    shutil.rmtree(tmp_path / "000020")
    (tmp_path / "000040").rename(tmp_path / "damaged-000040")
    with pytest.raises(UserError, match="damaged-000040"):
        load_newest(tmp_path)


def test_a_later_format_is_rejected_and_not_reported_as_damaged(tmp_path):
    save_steps(tmp_path, 20)
    state = tmp_path / "000020" / "state.json"
    state.write_text(state.read_text().replace('"version": 1', '"version": 2'))
    sums = json.loads((tmp_path / "000020" / "checksums.json").read_text())
    sums["files"]["state.json"]["sha256"] = hashlib.sha256(state.read_bytes()).hexdigest()
    (tmp_path / "000020" / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(UserError, match="nanorun-checkpoint 2"):
        load_newest(tmp_path)
    assert os.listdir(tmp_path) == ["000020"]


def test_leftovers_of_killed_writers_are_removed_and_an_interrupted_replacement_is_undone(tmp_path):
    save_steps(tmp_path, 20, 40)
    (tmp_path / "000040").rename(tmp_path / ".000040.old-host-1")
    shutil.copytree(tmp_path / "000020", tmp_path / ".000060.writing-host-1")
    shutil.copytree(tmp_path / "000020", tmp_path / ".000010.removed-host-1")
    assert newest_step(tmp_path) == 40
    assert sorted(os.listdir(tmp_path)) == ["000020", "000040"]
    (tmp_path / f".000060.writing-{os.uname().nodename}-{os.getpid()}").mkdir()  # of a namesake, now dead
    save_steps(tmp_path, 60)
    assert sorted(os.listdir(tmp_path)) == ["000020", "000040", "000060"]


@pytest.mark.parametrize(("keep", "left"), [(1, [70]), (3, [50, 60, 70]), (9, list(range(10, 80, 10)))])
def test_pruning_keeps_the_newest(tmp_path, keep, left):
    save_steps(tmp_path, *range(10, 80, 10))
    (tmp_path / "damaged-000005").mkdir()
    gone = prune(tmp_path, keep)
    assert steps(tmp_path) == left
    assert sorted(left + gone) == list(range(10, 80, 10))
    assert sorted(os.listdir(tmp_path)) == [f"{step:06d}" for step in left] + ["damaged-000005"]


def test_pruning_never_removes_the_newest_intact_checkpoint(tmp_path):
    save_steps(tmp_path, 10, 20, 30, 40)
    truncate(tmp_path / "000040" / "optimizer.safetensors")
    (tmp_path / "000030" / "state.json").unlink()
    assert prune(tmp_path, 1) == [10, 30]
    assert newest_step(tmp_path) == 20
    with pytest.raises(ValueError, match="at least one"):
        prune(tmp_path, 0)


def test_a_million_steps_sort_as_numbers(tmp_path):
    save_steps(tmp_path, 999_999, 1_000_000)
    assert steps(tmp_path) == [999_999, 1_000_000]
    assert newest_step(tmp_path) == 1_000_000


def test_a_save_killed_at_any_time_leaves_only_complete_checkpoints(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), "12", "3"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    newest = [int(line) for line in result.stdout.split()]
    assert len(newest) == 12
    assert newest == sorted(newest), "nothing acknowledged is ever lost"
    assert newest[-1] > 5


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of 1 MB and room for a few files."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"a small file system cannot be mounted here ({error})")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_without_space_is_detected_before_writing(small_disk):
    folder = small_disk("size=3m") / "checkpoints"
    save_steps(folder, 20)
    before = contents(folder)
    large = {"w": torch.ones(600_000)}
    with pytest.raises(UserError, match=r"000040 needs 3.45 MB, but .* has .* free"):
        save(folder, 40, large, {}, {})
    assert contents(folder) == before
    assert os.listdir(folder) == ["000020"]


def test_a_disk_that_fills_up_while_writing_keeps_the_earlier_ones(small_disk):
    folder = small_disk("size=8m,nr_inodes=11") / "checkpoints"  # the second checkpoint lacks an inode
    save_steps(folder, 20)
    before = contents(folder)
    with pytest.raises(UserError) as refused:
        save_steps(folder, 40)
    assert "000040 could not be written (No space left on device): free some space" in str(refused.value)
    assert "earlier checkpoints are intact" in str(refused.value)
    assert contents(folder) == before
    assert os.listdir(folder) == ["000020"]
    assert newest_step(folder) == 20


def test_a_file_size_limit_is_a_user_error(tmp_path):
    save_steps(tmp_path, 20)
    before = contents(tmp_path)
    code = (
        "import resource, sys, torch; from pathlib import Path; from nanorun.checkpoint import save\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "for step in (20, 40):\n"
        "    try: save(Path(sys.argv[1]), step, {'a': torch.ones(9)}, {'w': torch.ones(99_999)}, {})\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    first, second = result.stdout.splitlines()
    assert first.startswith("UserError The checkpoint")
    assert "000040 could not be written (File too large): allow larger files" in second
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["000020"]


@pytest.mark.parametrize("half_a_pair", [False, True])
def test_random_number_generators_are_restored(tmp_path, half_a_pair):
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(())),
            float(torch.randn(())),
        ]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    if half_a_pair:  # Gaussians are drawn in pairs, and the second waits
        random.gauss(0, 1), np.random.randn()
    save(tmp_path, 1, {}, checkpoint.rng_state(), {})
    expected = [draw() for _ in range(5)]
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    checkpoint.restore_rng(load(tmp_path / "000001").optimizer)
    assert [draw() for _ in range(5)] == expected
