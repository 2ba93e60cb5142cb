"""Programs that try to get out of the sandbox, or to hurt it from inside.

Each runs with `attempt(action)`, which prints OPEN and what came of it where the action succeeds, and `refused` where
it raises.  What would harm the machine if it were let through is asked for in a way that cannot succeed, and
`permitted` tells a refusal from any other error.  `call(name, *arguments)` makes a system call of this machine by name.
PARENT is the fork-server, found as a program would find it.
"""

PREAMBLE = r"""
import ctypes, errno, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": dict(open=2, vfork=58, fork=57, execve=59, ptrace=101, chmod=90, chown=92, rename=82,
    truncate=76, unlink=87, mkdir=83, symlink=88, link=86, utimensat=280, statx=332, newfstatat=262, openat=257,
    openat2=437, mount=165, unshare=272, setns=308, pivot_root=155, chroot=161, bpf=321, perf_event_open=298,
    userfaultfd=323, keyctl=250, add_key=248, io_uring_setup=425, memfd_create=319, memfd_secret=447,
    process_vm_readv=310, process_vm_writev=311, pidfd_open=434, pidfd_send_signal=424, pidfd_getfd=438, kcmp=312,
    shmget=29, semget=64, msgget=68, mq_open=240, sched_setaffinity=203, setpriority=141, prctl=157, seccomp=317,
    personality=135, reboot=169, init_module=175, kexec_load=246, settimeofday=164, clock_settime=227,
    sethostname=170, acct=163, swapon=167, iopl=172, ioperm=173, setuid=105, setresuid=117, setgroups=116,
    capset=126, inotify_init1=294, fanotify_init=300, name_to_handle_at=303, open_by_handle_at=304, splice=275,
    vmsplice=278, tee=276, sendfile=40, rt_sigqueueinfo=129, rt_tgsigqueueinfo=297, tkill=200, kill=62, tgkill=234,
    clone=56, clone3=435, socket=41, connect=42, bind=49, sendmsg=46, sendmmsg=307, fcntl=72, ioctl=16,
    prlimit64=302, landlock_create_ruleset=444, uname=63,
    get_robust_list=274, arch_prctl=158, modify_ldt=154, getdents64=217), "aarch64":
    dict(execve=221, ptrace=117, truncate=45, utimensat=88, statx=291, newfstatat=79, openat=56, openat2=437,
    mount=40, unshare=97, setns=268, pivot_root=41, chroot=51, bpf=280, perf_event_open=241, userfaultfd=282,
    keyctl=219, add_key=217, io_uring_setup=425, memfd_create=279, memfd_secret=447, process_vm_readv=270,
    process_vm_writev=271, pidfd_open=434, pidfd_send_signal=424, pidfd_getfd=438, kcmp=272, shmget=194, semget=190,
    msgget=186, mq_open=180, sched_setaffinity=122, setpriority=140, prctl=167, seccomp=277, personality=92,
    reboot=142, init_module=105, kexec_load=104, settimeofday=170, clock_settime=112, sethostname=161, acct=89,
    swapon=224, setuid=146, setresuid=147, setgroups=159, capset=91, inotify_init1=26, fanotify_init=262,
    name_to_handle_at=264, open_by_handle_at=265, splice=76, vmsplice=75, tee=77, sendfile=71, rt_sigqueueinfo=138,
    rt_tgsigqueueinfo=240, tkill=130, kill=129, tgkill=131, clone=220, clone3=435, socket=198, connect=203,
    bind=200, sendmsg=211, sendmmsg=269, fcntl=25, ioctl=29, prlimit64=261, landlock_create_ruleset=444,
    uname=160, get_robust_list=100, getdents64=61)}[os.uname().machine]
PARENT = os.getppid()
buffer = ctypes.create_string_buffer(4096)
OTHERS = socket.socketpair()

def attempt(action):
    try:
        print("OPEN", action())
    except BaseException as error:
        print("refused", type(error).__name__, error)

def permitted(name, *arguments):
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise

def call(name, *arguments):
    found = libc.syscall(NUMBERS[name], *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
"""

ATTEMPTS = {
    # files
    "read_passwd": "open('/etc/passwd').read()",
    "read_own_environment": "open('/proc/self/environ').read()",
    "read_parents_environment": "open(f'/proc/{PARENT}/environ', 'rb').read()",
    "read_parents_memory": "open(f'/proc/{PARENT}/mem', 'rb').read(1)",
    "read_parents_command": "open(f'/proc/{PARENT}/cmdline').read()",
    "write_tmp": "open('/tmp/posttrain-attack', 'w')",
    "write_shared_memory": "open('/dev/shm/posttrain-attack', 'w')",
    "write_here": "open('posttrain-attack', 'w')",
    "list_root": "os.listdir('/')",
    "list_by_descriptor": "os.listdir(0)",
    "stat": "os.stat('/etc/passwd')",
    "statx": "call('statx', -100, b'/etc/passwd', 0, 0xfff, buffer)",
    "stat_by_path_of_descriptor": "call('newfstatat', -100, b'/etc/passwd', buffer, 0)",
    "openat": "call('openat', -100, b'/etc/passwd', 0)",
    "openat2": "call('openat2', -100, b'/etc/passwd', struct.pack('QQQ', 0, 0, 0), 24)",
    "chmod": "os.chmod('/tmp', 0o777)",
    "utime": "os.utime('/tmp')",
    "rename": "os.rename('/tmp/a', '/tmp/b')",
    "truncate": "os.truncate('/dev/null', 0)",
    "unlink": "os.unlink('/tmp/posttrain-victim')",
    "mkdir": "os.mkdir('/tmp/posttrain-attack-folder')",
    "symlink": "os.symlink('/etc/passwd', '/tmp/posttrain-attack-link')",
    "chdir": "os.chdir('/tmp')",
    "memfd": "os.memfd_create('x')",
    "memfd_secret": "call('memfd_secret', 0)",
    "open_by_handle": "call('open_by_handle_at', 0, buffer, 0)",
    "inotify": "call('inotify_init1', 0)",
    "fanotify": "call('fanotify_init', 0, 0)",
    "import_from_disk": "__import__('this')",
    # network
    "tcp": "socket.create_connection(('127.0.0.1', 22), 1)",
    "tcp_listen": "socket.create_server(('127.0.0.1', 0))",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
    "ipv6": "socket.socket(socket.AF_INET6)",
    "unix_socket": "socket.socket(socket.AF_UNIX)",
    "netlink": "socket.socket(16, socket.SOCK_RAW)",
    "raw_packets": "socket.socket(17, socket.SOCK_RAW)",
    "send_to_a_named_socket": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')",
    "send_to_an_abstract_socket": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0victim')",
    "out_of_band": "OTHERS[0].send(b'x', socket.MSG_OOB)",
    "out_of_band_received": "OTHERS[0].send(b'x') and OTHERS[1].recv(1, socket.MSG_OOB | socket.MSG_DONTWAIT)",
    "who_is_at_the_other_end": "OTHERS[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)",
    "who_is_at_the_other_end_of_the_channel": "socket.socket(fileno=3).getsockopt(1, 17, 12)",
    "a_pidfd_of_the_other_end": "OTHERS[0].getsockopt(socket.SOL_SOCKET, 77, 4)",
    "groups_of_the_other_end": "OTHERS[0].getsockopt(socket.SOL_SOCKET, 59, 256)",
    "label_of_the_other_end": "OTHERS[0].getsockopt(socket.SOL_SOCKET, 31, 256)",
    "packets_on_a_pipe": "__import__('fcntl').fcntl(1, 4, os.O_DIRECT | os.O_WRONLY)",
    "signals_of_a_pipe": "__import__('fcntl').fcntl(1, 4, 0x2000 | os.O_WRONLY)",
    "send_a_descriptor": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "socketpair_elsewhere": "socket.socketpair(socket.AF_INET)",
    # other processes
    "signal_parent": "os.kill(PARENT, 0)",
    "stop_parent": "os.kill(PARENT, signal.SIGSTOP)",
    "signal_everybody": "os.kill(-1, 0)",
    "signal_group": "os.killpg(os.getpgid(0), 0)",
    "tgkill_parent": "call('tgkill', PARENT, PARENT, 9)",
    "tkill_parent": "call('tkill', PARENT, 9)",
    "queue_a_signal": "call('rt_sigqueueinfo', PARENT, 9, buffer)",
    "pidfd": "call('pidfd_open', PARENT, 0)",
    "owner_of_a_descriptor": "__import__('fcntl').fcntl(socket.socketpair()[0], 8, PARENT)",
    "signal_of_a_descriptor": "__import__('fcntl').fcntl(socket.socketpair()[0], 10, 9)",
    "owner_by_ioctl": "__import__('fcntl').ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', PARENT))",
    "type_into_the_terminal": "__import__('fcntl').ioctl(0, 0x5412, b'x')",
    "ptrace": "call('ptrace', 16, PARENT, 0, 0)",
    "read_memory_of_parent": "call('process_vm_readv', PARENT, buffer, 1, buffer, 1, 0)",
    "write_memory_of_parent": "call('process_vm_writev', PARENT, buffer, 1, buffer, 1, 0)",
    "compare_with_parent": "call('kcmp', os.getpid(), PARENT, 0, 0, 0)",
    "group_of_parent": "os.getpgid(PARENT)",
    "session_of_parent": "os.getsid(PARENT)",
    "whether_a_process_is_there": "os.getpgid(1)",
    "processors_of_parent": "os.sched_getaffinity(PARENT)",
    "clock_of_parent": "time.clock_gettime((~PARENT << 3) | 2)",
    "resolution_of_the_clock_of_parent": "time.clock_getres((~PARENT << 3) | 2)",
    "robust_list_of_parent": "call('get_robust_list', PARENT, buffer, buffer)",
    "limits_of_parent": "call('prlimit64', PARENT, 7, 0, buffer)",
    "own_limits_raised": "__import__('resource').setrlimit(__import__('resource').RLIMIT_CPU, (9999, 9999))",
    "affinity_of_parent": "os.sched_setaffinity(PARENT, {0})",
    "priority": "os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "fork": "os.fork() or os._exit(0)",
    "forkpty": "os.forkpty()",
    "vfork": "call('vfork') if 'vfork' in NUMBERS else call('clone', 0x4111, 0, 0, 0, 0)",
    "clone_without_thread": "call('clone', 17, 0, 0, 0, 0)",
    "clone_with_namespace": "call('clone', 0x10000000 | 0x10000 | 0x900, 0, 0, 0, 0)",
    "clone3": "call('clone3', struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)",
    "exec": "os.execv('/bin/true', ['true'])",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "__import__('subprocess').run(['/bin/true'])",
    "system": "os.system('true') == 0 or 1 / 0",
    "multiprocessing": "__import__('multiprocessing').Process(target=int).start()",
    # the kernel
    "unshare": "call('unshare', 0x10000000)",
    "setns": "call('setns', 0, 0)",
    "mount": "permitted('mount', b'none', b'/posttrain-nowhere', b'no-such-kind', 0, 0)",
    "chroot": "os.chroot('/tmp')",
    "bpf": "call('bpf', 0, buffer, 4)",
    "perf": "call('perf_event_open', buffer, 0, -1, -1, 0)",
    "userfaultfd": "call('userfaultfd', 0)",
    "io_uring": "call('io_uring_setup', 1, buffer)",
    "keys": "call('add_key', b'user', b'x', b'x', 1, -2)",
    "keyctl": "call('keyctl', 0, -1, 0)",
    "shared_memory": "call('shmget', 0, 4096, 0o1600)",
    "semaphores": "call('semget', 0, 1, 0o1600)",
    "message_queues": "call('msgget', 0, 0o1600)",
    "posix_message_queue": "call('mq_open', b'x', 0o100, 0o600, 0)",
    "become_root": "os.setuid(0)",
    "groups": "os.setgroups([0])",
    "capabilities": "call('capset', buffer, buffer)",
    "clock": "permitted('clock_settime', 0, struct.pack('qq', -1, -1))",
    "host_name": "call('sethostname', b'x', 1)",
    "name_of_the_host": "call('uname', buffer)",
    "personality": "call('personality', 0x40000)",
    "dumpable_again": "call('prctl', 4, 1, 0, 0, 0)",
    "another_filter": "call('seccomp', 1, 0, buffer)",
    "x32": "call('openat', -100, b'/etc/passwd', 0) if os.uname().machine != 'x86_64' else"
    " libc.syscall(0x40000000 | 39) >= 0 or 1 / 0",
    "splice": "call('splice', 0, 0, 1, 0, 1, 0)",
    "sendfile": "os.sendfile(1, 0, 0, 1)",
}
"""One expression each, which must raise."""

BOMBS = {
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "one_big_object": "bytearray(1 << 40)",
    "big_integer": "x = 10 ** 10 ** 8",
    "recursion": "def f(): f()\nsys.setrecursionlimit(10 ** 9)\nf()",
    "threads": "for _ in range(400): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    "endless": "while True: pass",
    "endless_in_c": "sum(iter(int, 1))",
    "swallows_everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "ignores_signals": "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
    "while True: pass",
    "sleeps": "time.sleep(1000)",
    "some_threads": "from _thread import start_new_thread as start\nthreading.stack_size(32768)\n"
    "for _ in range(400): start(time.sleep, (3,))\ntime.sleep(3)",
    "waits_for_a_thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "output": "while True: sys.stdout.write('x' * 65536)",
    "errors": "while True: sys.stderr.write('x' * 65536)",
    "closes_everything": "os.closerange(0, 100)\ntime.sleep(1000)",
    "kills_itself": "os.kill(os.getpid(), 9)",
    "segfault": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "leaves_at_once": "os._exit(0)",
    "deadlock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "floods_the_channel": "while True:\n    for n in range(3, 10):\n        try: os.write(n, b'x' * 65536)\n"
    "        except OSError: pass",
}
"""Whole programs that do not come to a good end; the sandbox must go on as if nothing had been."""
