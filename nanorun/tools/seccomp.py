"""The seccomp filter of the sandbox: a short allowlist of system calls; all others are refused.

The kernel runs a classic BPF program before each system call. Ours is a list of "if it is this number, allow",
and ends with ENOSYS, "not implemented", which the C library and Python handle gracefully because older kernels
return it. System calls that future kernels add are therefore refused, too.

The list has what one Python process needs: files, memory, threads, time, signals, pipes. Excluded on purpose:
every way to create a second process (fork, vfork, clone without CLONE_THREAD, and clone3, whose flags a filter
cannot see), sockets other than a connected pair, mounts and namespaces, ptrace, keys, bpf, perf, io_uring, and
memory that no limit counts (memfd, System V shared memory, message queues).
"""

import struct

# name, number on x86-64 / number on aarch64 ("-": not there), as in the kernel's headers
_ALLOWED = """
read 0/63, write 1/64, open 2/-, openat 257/56, creat 85/-, close 3/57, close_range 436/436, lseek 8/62,
pread64 17/67, pwrite64 18/68, readv 19/65, writev 20/66, preadv 295/69, pwritev 296/70, dup 32/23,
dup2 33/-, dup3 292/24, fcntl 72/25, flock 73/32, fsync 74/82, fdatasync 75/83, truncate 76/45,
ftruncate 77/46, sendfile 40/71, copy_file_range 326/285, fadvise64 221/223

stat 4/-, fstat 5/80, lstat 6/-, newfstatat 262/79, statx 332/291, statfs 137/43, fstatfs 138/44,
access 21/-, faccessat 269/48, faccessat2 439/439, readlink 89/-, readlinkat 267/78, getdents 78/-,
getdents64 217/61, getcwd 79/17, chdir 80/49, fchdir 81/50, mkdir 83/-, mkdirat 258/34, rmdir 84/-,
unlink 87/-, unlinkat 263/35, rename 82/-, renameat 264/38, renameat2 316/276, link 86/-, linkat 265/37,
symlink 88/-, symlinkat 266/36, chmod 90/-, fchmod 91/52, fchmodat 268/53, chown 92/-, fchown 93/55,
fchownat 260/54, utimensat 280/88, utime 132/-, utimes 235/-, umask 95/166, getxattr 191/8,
lgetxattr 192/9, fgetxattr 193/10, listxattr 194/11, llistxattr 195/12, flistxattr 196/13

mmap 9/222, munmap 11/215, mprotect 10/226, mremap 25/216, msync 26/227, madvise 28/233, brk 12/214

futex 202/98, set_robust_list 273/99, set_tid_address 218/96, rseq 334/293, gettid 186/178,
sched_yield 24/124, sched_getaffinity 204/123, sched_getscheduler 145/120, sched_getparam 143/121,
sched_get_priority_max 146/125, sched_get_priority_min 147/126, getcpu 309/168, arch_prctl 158/-

clock_gettime 228/113, clock_getres 229/114, clock_nanosleep 230/115, nanosleep 35/101,
gettimeofday 96/169, time 201/-, times 100/153, alarm 37/-, setitimer 38/103, getitimer 36/102,
restart_syscall 219/128

rt_sigaction 13/134, rt_sigprocmask 14/135, rt_sigreturn 15/139, rt_sigpending 127/136,
rt_sigtimedwait 128/137, rt_sigsuspend 130/133, sigaltstack 131/132, pause 34/-, kill 62/129,
tkill 200/130, tgkill 234/131

select 23/-, pselect6 270/72, poll 7/-, ppoll 271/73, epoll_create 213/-, epoll_create1 291/20,
epoll_ctl 233/21, epoll_wait 232/-, epoll_pwait 281/22, epoll_pwait2 441/441, eventfd 284/-,
eventfd2 290/19, pipe 22/-, pipe2 293/59, sendto 44/206, recvfrom 45/207, sendmsg 46/211,
recvmsg 47/212, shutdown 48/210, getsockname 51/204, getpeername 52/205

execve 59/221, exit 60/93, exit_group 231/94, wait4 61/260, waitid 247/95, getpid 39/172,
getppid 110/173, getpgid 121/155, getpgrp 111/-, getsid 124/156, getuid 102/174, geteuid 107/175,
getgid 104/176, getegid 108/177, getgroups 115/158, getresuid 118/148, getresgid 120/150,
setresuid 117/147, setresgid 119/149, setgroups 116/159, getpriority 140/141, getrusage 98/165,
getrlimit 97/163, setrlimit 160/164, uname 63/160, sysinfo 99/179, getrandom 318/278
"""

# Opcodes and return values (linux/bpf_common.h, linux/seccomp.h).
_LOAD, _IF_EQUAL, _IF_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _NOT_IMPLEMENTED, _KILL = 0x7FFF0000, 0x00050000 | 38, 0x80000000

# System calls that are allowed only if an argument has one of these values (or this bit).
_CLONE_THREAD, _AF_UNIX = 0x00010000, 1
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, window size, FIO...
_CHECKED = (  # numbers, which argument, the test, values
    ((56, 220), 0, _IF_BIT, (_CLONE_THREAD,)),
    ((53, 199), 0, _IF_EQUAL, (_AF_UNIX,)),  # socketpair
    ((16, 29), 1, _IF_EQUAL, _HARMLESS_IOCTLS),
    ((302, 261), 0, _IF_EQUAL, (0,)),  # prlimit64 of the calling process
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH

MACHINES = tuple(_MACHINES)


def filter_program(machine: str) -> bytes:
    """The filter for `platform.machine()`, as bubblewrap's --seccomp takes it."""
    column, architecture = _MACHINES[machine]
    program = [
        _instruction(_LOAD, 4),  # a call with another architecture's numbers is an attack
        _instruction(_IF_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, 0),
    ]
    for entry in _ALLOWED.replace("\n\n", ",").split(","):
        number = entry.split()[1].split("/")[column]
        if number != "-":
            program += [_instruction(_IF_EQUAL, int(number), 0, 1), _instruction(_RETURN, _ALLOW)]
    for numbers, argument, test, values in _CHECKED:
        body = [_instruction(_LOAD, 16 + 8 * argument)]
        for value in values:
            body += [_instruction(test, value, 0, 1), _instruction(_RETURN, _ALLOW)]
        body.append(_instruction(_RETURN, _NOT_IMPLEMENTED))
        program += [_instruction(_IF_EQUAL, numbers[column], 0, len(body)), *body]
    program.append(_instruction(_RETURN, _NOT_IMPLEMENTED))
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction; a jump is the number of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
