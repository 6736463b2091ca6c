"""The seccomp filter of each architecture, evaluated by a small BPF interpreter."""

import struct

import pytest

from nanorun.tools.seccomp import MACHINES, filter_program

ALLOW, NOT_IMPLEMENTED, KILL = "allow", "not implemented", "kill"
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {  # of calls that must be judged alike on both
    "x86_64": {"read": 0, "mmap": 9, "openat": 257, "futex": 202, "execve": 59, "ptrace": 101, "socket": 41}
    | {"mount": 165, "unshare": 272, "bpf": 321, "memfd_create": 319, "clone3": 435, "io_uring_setup": 425}
    | {"clone": 56, "socketpair": 53, "ioctl": 16, "prlimit64": 302},
    "aarch64": {
        "read": 63,
        "mmap": 222,
        "openat": 56,
        "futex": 98,
        "execve": 221,
        "ptrace": 117,
        "socket": 198,
    }
    | {"mount": 40, "unshare": 97, "bpf": 280, "memfd_create": 279, "clone3": 435, "io_uring_setup": 425}
    | {"clone": 220, "socketpair": 199, "ioctl": 29, "prlimit64": 261},
}


def judge(program: bytes, architecture: int, number: int, *arguments: int) -> str:
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    at = loaded = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("<I", data, value)[0]
        elif code == 0x15:
            at += if_true if loaded == value else if_false
        elif code == 0x45:
            at += if_true if loaded & value else if_false
        else:
            assert code == 0x06
            return {0x7FFF0000: ALLOW, 0x00050026: NOT_IMPLEMENTED, 0x80000000: KILL}[value]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        *((name, (), ALLOW) for name in ("read", "mmap", "openat", "futex", "execve")),
        *((name, (), NOT_IMPLEMENTED) for name in ("ptrace", "socket", "mount", "unshare", "bpf")),
        *((name, (), NOT_IMPLEMENTED) for name in ("memfd_create", "clone3", "io_uring_setup")),
        ("clone", (0x3D0F00,), ALLOW),  # the flags of pthread_create
        ("clone", (17,), NOT_IMPLEMENTED),  # those of fork
        ("clone", (0x4000 | 0x100 | 17,), NOT_IMPLEMENTED),  # of vfork
        ("clone", (0x10000000 | 17,), NOT_IMPLEMENTED),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (16, 1), NOT_IMPLEMENTED),
        ("ioctl", (0, 0x5401), ALLOW),  # isatty
        ("ioctl", (0, 0x5412), NOT_IMPLEMENTED),  # TIOCSTI
        ("ioctl", (0x5401, 0x5412), NOT_IMPLEMENTED),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), NOT_IMPLEMENTED),  # the sandbox's first process
    ],
)
def test_a_system_call_has_the_same_verdict_on_every_machine(
    machine: str, call: str, arguments: tuple[int, ...], verdict: str
) -> None:
    number, program = NUMBERS[machine][call], filter_program(machine)
    assert judge(program, ARCHITECTURE[machine], number, *arguments) == verdict


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architectures_are_killed_and_unknown_calls_return_enosys(machine: str) -> None:
    program = filter_program(machine)
    assert judge(program, 0x40000003, NUMBERS[machine]["read"]) == KILL
    assert all(
        judge(program, ARCHITECTURE[machine], number) == NOT_IMPLEMENTED
        for number in (*range(442, 1000), 0x40000000, 2**32 - 1)
    )
