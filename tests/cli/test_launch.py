"""`pccl launch` against puppets: scripts that connect to the test and do what it tells them.

The launcher passes `--master` on without dialling it, so most tests give it the address of their own listening
socket. Every puppet connects there, names itself and executes the lines it receives; its death closes the connection.
"""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.cli import launch as launch_command
from pccl.cli import parser
from tests.conftest import Command
from tests.support.commands import ended, pccl
from tests.support.streams import TIMEOUT_S, Lines

PUPPET = """\
import os, signal, socket, subprocess, sys
host, port = os.environ["PCCL_MASTER"].rsplit(":", 1)
connection = socket.create_connection((host, int(port)))
connection.sendall(sys.argv[1].encode() if len(sys.argv) > 1 else os.environ["PCCL_LAUNCH_INDEX"].encode())
for line in connection.makefile():
    exec(line)
"""


class Launched:
    """A running `pccl launch` and the connections of its puppets, by name."""

    def __init__(self, process: subprocess.Popen[str], listener: socket.socket) -> None:
        self.process = process
        self._listener = listener
        assert process.stderr is not None
        self.stdout = Lines(process.stdout or io.StringIO())
        self.stderr = Lines(process.stderr)
        self.puppets: dict[str, socket.socket] = {}

    def accept(self, count: int) -> None:
        for _ in range(count):
            connection, _ = self._listener.accept()
            connection.settimeout(TIMEOUT_S)
            self.puppets[connection.recv(16).decode()] = connection

    def tell(self, name: str, line: str) -> None:
        self.puppets[name].sendall(line.encode() + b"\n")

    def tell_all(self, line: str) -> None:
        for name in self.puppets:
            self.tell(name, line)

    def is_dead(self, name: str) -> bool:
        """Waits for the puppet's end."""
        try:
            return self.puppets[name].recv(1) == b""
        except ConnectionResetError:
            return True

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        for connection in self.puppets.values():
            connection.close()


Launch = Callable[..., Launched]


@pytest.fixture
def puppet(tmp_path: Path) -> str:
    path = tmp_path / "puppet.py"
    path.write_text(PUPPET)
    return str(path)


@pytest.fixture
def launch(puppet: str) -> Iterator[Launch]:
    with ExitStack() as resources:
        listener = resources.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(TIMEOUT_S)

        def start(*options: str, count: int = 2, stdout: int = subprocess.PIPE) -> Launched:
            address = "{}:{}".format(*listener.getsockname())
            process = pccl("launch", "-n", str(count), "--master", address, *options, puppet, stdout=stdout)
            resources.callback(process.wait)
            resources.callback(process.kill)
            launched = Launched(process, listener)
            resources.callback(launched.close)
            launched.accept(count)
            return launched

        yield start


def _launch_and_wait(*arguments: str, **streams: int) -> subprocess.CompletedProcess[str]:
    return ended("launch", "--master", "nowhere:1", *arguments, **streams)


def _script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


# What a script is given and what becomes of its output


def test_environment_arguments_and_streams(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys\n"
        "print(os.environ['PCCL_MASTER'], os.environ['PCCL_LAUNCH_INDEX'], os.environ['PCCL_LAUNCH_COUNT'])\n"
        "print(sys.argv[1:], file=sys.stderr)\n"
        "print(sys.stdin.read(), end='no newline')\n",
    )
    done = _launch_and_wait("-n", "2", script, "-n", "7", "--", "-m")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[0] no newline",
        "[0] nowhere:1 0 2",
        "[1] no newline",
        "[1] nowhere:1 1 2",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] ['-n', '7', '--', '-m']", "[1] ['-n', '7', '--', '-m']"]


PLACE = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE PCCL_LAUNCH_INDEX PCCL_LAUNCH_COUNT MASTER_ADDR MASTER_PORT"


def test_ranks_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE.split():
        monkeypatch.delenv(name, raising=False)
    script = _script(tmp_path, f"import os; print(*(os.environ[name] for name in {PLACE!r}.split()))")
    done = _launch_and_wait("-n", "2", "--nnodes", "3", "--node-rank", "1", script)
    assert sorted(done.stdout.splitlines()) == ["[2] 2 6 0 2 2 6 nowhere 29500", "[3] 3 6 1 2 3 6 nowhere 29500"]
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "4711")
    done = _launch_and_wait("--nproc-per-node", "1", script)
    assert done.stdout == "[0] 0 1 0 1 0 1 elsewhere 4711\n"


def test_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    script = _script(tmp_path, f"import os; print([name for name in {PLACE!r}.split() if name in os.environ])")
    done = _launch_and_wait("-n", "1", "--no-ranks", script)
    assert done.stdout == "[0] ['PCCL_LAUNCH_INDEX', 'PCCL_LAUNCH_COUNT']\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nnodes", "2", "x.py"], "pccl launch: this node's number is unknown: give --node-rank, or set NODE_RANK"),
        (["--http", "--master", "nowhere:1", "x.py"], "needs a master that is started here; give --http to the"),
        (["--fail-fast", "--tolerate-losses", "x.py"], "not allowed with argument --fail-fast"),
    ],
)
def test_invalid_options(arguments: list[str], text: str, command: Command) -> None:
    done = command("launch", *arguments)
    assert done.returncode == 2
    assert text in done.stderr


def test_unknown_option_shows_usage_of_launch(command: Command) -> None:
    done = command("launch", "--restarts", "0", "script.py")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: pccl launch ")
    assert done.stderr.endswith("pccl launch: error: unrecognized arguments: --restarts\n")


LIKE_OPTIONS = st.sampled_from(
    ["--", "-m", "-h", "--help", "-n3", "--n", "--nnodes=2", "--version", "--v", "--=x", "-="]
)


@given(st.lists(LIKE_OPTIONS | st.text()))
def test_arguments_of_the_script(arguments: list[str]) -> None:
    for before in ([], ["-n", "3"], ["--"]):
        found = parser().parse_args(["launch", *before, "script.py", *arguments])
        assert launch_command.script_of(found) == ["script.py", *arguments]
        assert found.count == (3 if "-n" in before else 2)
        assert not found.as_module


@pytest.mark.parametrize("arguments", [["--nods", "2", "script.py"], ["--n", "2", "script.py"], ["--no-rank", "x.py"]])
def test_unknown_option(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["launch", *arguments])
    assert f"unrecognized arguments: {arguments[0]}" in capsys.readouterr().err


def test_module() -> None:
    done = _launch_and_wait("-n", "1", "-m", "json.tool", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("[0] usage: ")


def test_lines_never_interleave(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys\n"
        "index = os.environ['PCCL_LAUNCH_INDEX']\n"
        "for number in range(200):\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        for part in (f'{number} ', index * 50, index * 50, '\\n'):\n"
        "            stream.write(part)\n",
    )
    done = _launch_and_wait("-n", "3", script, stderr=subprocess.STDOUT)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 2 * 200
    assert all(re.fullmatch(r"\[(\d)\] \d+ \1{100}", line) for line in lines)


@pytest.mark.slow
def test_output_is_not_delayed(launch: Launch) -> None:
    run = launch()
    run.tell("1", "print('now'); print('too', file=sys.stderr)")
    run.stdout.expect(r"\[1\] now")
    run.stderr.expect(r"\[1\] too")
    run.tell_all("sys.exit()")
    assert run.wait() == 0


def test_closed_stdout_ends_the_scripts(launch: Launch) -> None:
    reader, writer = os.pipe()
    run = launch(stdout=writer)
    os.close(writer)
    os.close(reader)
    run.tell("0", "print('to nobody')")
    assert run.wait() == 128 + signal.SIGTERM


# Exit codes


def test_dead_script(launch: Launch) -> None:
    run = launch(count=3)
    run.tell("1", "os.kill(os.getpid(), signal.SIGKILL)")
    run.stderr.expect(r"pccl launch: \[1\] was killed by SIGKILL")
    run.tell("2", "sys.exit(3)")
    run.stderr.expect(r"pccl launch: \[2\] exited with code 3")
    run.tell("0", "print('alive')")
    run.stdout.expect(r"\[0\] alive")
    run.tell("0", "sys.exit()")
    assert run.wait() == 128 + signal.SIGKILL
    assert run.stderr.rest()[-1] == "pccl launch: 2 of 3 failed: [1] SIGKILL, [2] code 3"


def test_tolerate_losses(launch: Launch) -> None:
    run = launch("--tolerate-losses", count=3)
    run.tell("1", "os.kill(os.getpid(), signal.SIGKILL)")
    run.stderr.expect(r"pccl launch: \[1\] was killed by SIGKILL; the others continue")
    run.tell("0", "sys.exit()")
    run.tell("2", "sys.exit()")
    assert run.wait() == 0
    assert run.stderr.rest()[-1] == "pccl launch: 1 of 3 lost: [1] SIGKILL"


def test_tolerate_losses_fails_on_errors(launch: Launch) -> None:
    run = launch("--tolerate-losses", count=3)
    run.tell("1", "os.kill(os.getpid(), signal.SIGKILL)")
    run.stderr.expect(r"pccl launch: \[1\] was killed by SIGKILL; the others continue")
    run.tell("2", "sys.exit(3)")
    run.stderr.expect(r"pccl launch: \[2\] exited with code 3")
    run.tell("0", "sys.exit()")
    assert run.wait() == 3


@pytest.mark.slow
def test_fail_fast_ends_the_others(launch: Launch) -> None:
    run = launch("--fail-fast", count=3)
    run.tell("1", "sys.exit(5)")
    assert run.wait() == 5
    assert all(run.is_dead(name) for name in "012")
    assert run.stderr.rest()[-1].startswith("pccl launch: 3 of 3 failed: [1] code 5, ")


# Signals


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
def test_user_signals(launch: Launch, number: signal.Signals) -> None:
    run = launch()
    run.tell_all(f"signal.signal({number.value}, lambda *_: print('caught')); print('set')")
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] set")
    run.process.send_signal(number)
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] caught")
    run.tell_all("sys.exit()")
    assert run.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_ending_signals(launch: Launch, number: signal.Signals) -> None:
    run = launch("--grace", "1000")  # on a busy machine it may take Python long to end
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    summary = run.stderr.rest()[-1].removeprefix("pccl launch: 2 of 2 failed: ")
    assert sorted(summary.split(", ")) == [f"[0] {number.name}", f"[1] {number.name}"]


def test_ctrl_c(launch: Launch) -> None:
    run = launch()
    run.tell_all("signal.signal(signal.SIGINT, lambda *_: sys.exit()); print('set')")
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] set")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0


def test_second_ctrl_c_kills(launch: Launch) -> None:
    run = launch("--grace", "1000")
    run.tell_all("signal.signal(signal.SIGINT, lambda *_: print('not now')); print('set')")
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] set")
    run.process.send_signal(signal.SIGINT)
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] not now")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_grace_period(launch: Launch) -> None:
    run = launch("--grace", "0.1")
    run.tell_all("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set')")
    for name in run.puppets:
        run.stdout.expect(rf"\[{name}\] set")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGKILL


# Nobody is left behind

GRANDCHILD = "subprocess.Popen([sys.executable, sys.argv[0], 'grandchild'])"


def test_killed_launcher(launch: Launch) -> None:
    run = launch()
    run.tell("0", GRANDCHILD)
    run.accept(1)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    assert all(run.is_dead(name) for name in ("0", "1", "grandchild"))


@pytest.mark.slow
def test_grandchildren(launch: Launch) -> None:
    run = launch()
    run.tell("0", GRANDCHILD)
    run.accept(1)
    run.tell("0", "sys.exit()")
    run.tell("1", "sys.exit()")
    assert run.wait() == 0
    assert run.is_dead("grandchild")


# With a master


def test_page(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys, time\n"
        "from pccl import Communicator\n"
        "with Communicator() as comm:\n"
        "    comm.wait_for_peers(2)\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "    comm.barrier()\n",
    )
    seen = tmp_path / "seen"
    arguments = ("launch", "-n", "2", "--http", "--fail-fast", script, str(seen))
    with pccl(*arguments, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        shown = Lines(process.stderr).expect(r"pccl launch: the run's status page is at (http://127\.0\.0\.1:\d+/)")
        with urllib.request.urlopen(shown[1], timeout=TIMEOUT_S) as page:
            assert page.status == 200
        seen.touch()
        assert process.wait(TIMEOUT_S) == 0


def test_master(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, socket\n"
        "host, port = os.environ['PCCL_MASTER'].rsplit(':', 1)\n"
        "socket.create_connection((host, int(port))).close()\n"
        "print(port)\n",
    )
    done = ended("launch", "-n", "2", script)
    assert done.returncode == 0, done.stderr
    ports = {line.split()[1] for line in done.stdout.splitlines()}
    (port,) = ports
    where = "to add a peer from another terminal of this machine"
    assert f"pccl launch: {where}: PCCL_MASTER=127.0.0.1:{port} python {script}\n" in done.stderr
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(port))) != 0


@pytest.mark.slow
def test_master_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        done = ended("launch", "--listen", address, "-m", "this")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "[master] pccl master: " in done.stderr


@pytest.mark.parametrize(
    "arguments", ["launch -n 1 --master 127.0.0.1:1 -m this", "master --listen 127.0.0.1:0 --state none"]
)
def test_refused_thread_is_one_line(arguments: str) -> None:
    program = (
        "import sys, threading\n"
        "from pccl import cli\n"
        "from pccl.cli import output\n"
        "from pccl.tools import harness\n"
        "class Thread(threading.Thread):\n"
        '    def start(self): raise RuntimeError("can\'t start new thread")\n'
        "class Refusing:\n"
        "    def __getattr__(self, name): return Thread if name == 'Thread' else getattr(threading, name)\n"
        "output.threading = harness.threading = Refusing()\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", program, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == (
        "pccl: can't start new thread: raise the limit of memory (ulimit -v) or of processes (ulimit -u)\n"
    )


def test_slow_master_is_reported() -> None:
    code = "from pccl import cli; from pccl.tools import launch; launch.SLOW_START_S = 0.01; exit(cli.main())"
    command = [sys.executable, "-P", "-c", code, "launch", "-n", "1", "-m", "this"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0
    assert "the master has not listened within 0.01 s; still waiting for it" in done.stderr


# Several nodes


EAGER = """\
import pccl, pccl._session_holder as holder
holder.ATTEMPT_INTERVAL_S = holder.ATTEMPT_INTERVAL_S = 0.02
holder.FIRST_S = 0.2
with pccl.Communicator() as comm:
    print("world", comm.wait_for_peers(2))  # the other peer may leave at once
"""


def test_nodes_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    """The second node's copies look for the first one's master, which records nothing on disk."""
    monkeypatch.delenv("PCCL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = tmp_path / "script.py"
    script.write_text(EAGER)
    with ExitStack() as resources:
        nodes = []
        for rank, where in ((1, "--master"), (0, "--listen")):
            words = ("launch", "-n", "1", "--nnodes", "2", "--node-rank", str(rank), where, nobody, str(script))
            process = pccl(*words)
            resources.callback(process.wait)
            resources.callback(process.kill)
            assert process.stdout is not None
            assert process.stderr is not None
            nodes.append((process, Lines(process.stdout), Lines(process.stderr)))
            if rank == 1:  # more than five attempts
                nodes[0][2].expect(r"\[1\] (?:.* )?connect has waited .* attempt \d\d+: .*Connection refused.*")
        for (process, stdout, _), rank in zip(nodes, (1, 0), strict=True):
            stdout.expect(rf"\[{rank}\] world 2")
            assert process.wait(TIMEOUT_S) == 0
        other = f"pccl launch --nnodes 2 --node-rank 1 --master {nobody} -n 1 {script}"
        nodes[1][2].expect(re.escape(f"pccl launch: on the other node: {other}"))
    assert not (tmp_path / "state").exists()


def test_peer_of_another_launch_is_refused_at_this_launchs_master(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys\n"
        "from pccl import Communicator, PCCLError\n"
        "own = os.environ['PCCL_RUN']\n"
        "with Communicator():\n"
        "    os.environ['PCCL_RUN'] = 'other.py-1'\n"
        "    try:\n"
        "        Communicator().connect()\n"
        "    except PCCLError as error:\n"
        "        assert own.startswith('script.py-') and repr(own) in str(error) and \"'other.py-1'\" in str(error)\n"
        "        sys.exit()\n"
        "sys.exit('it has joined')\n",
    )
    done = ended("launch", "-n", "1", script)
    assert done.returncode == 0, done.stderr


# Several hosts. A stand-in for ssh runs the commands here.

SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = unreachable ] && { echo "no route to $1" >&2; exit 255; }
echo "$@" >> "$SSH_LOG"
shift
exec "$@"
"""


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_hosts_get_ranks_variables_and_prefixes(launch: Launch, ssh_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TOKEN", "it's secret")
    run = launch("--hosts", "me@a,b,c", "--run", "r", count=1)
    run.accept(2)
    run.tell_all("print(*map(os.environ.get, ('PCCL_TOKEN', 'PCCL_RUN', 'RANK', 'WORLD_SIZE', 'MASTER_ADDR')))")
    for number, host in enumerate(("me@a", "b", "c")):
        run.stdout.expect(rf"\[{host}\] \[{number}\] it's secret r {number} 3 a")
    assert sorted(ssh_log.read_text().splitlines()) == ["b sh -s", "c sh -s", "me@a sh -s"]
    run.tell_all("sys.exit()")
    assert run.wait() == 0


def test_ctrl_c_ends_all_hosts(launch: Launch, ssh_log: Path) -> None:
    run = launch("--hosts", "a,b", "--grace", "1000", count=1)
    run.accept(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGTERM
    assert all(run.is_dead(name) for name in ("0", "1"))


def test_hosts_end_with_a_killed_launcher(launch: Launch, ssh_log: Path) -> None:
    run = launch("--hosts", "a,b", count=1)
    run.accept(1)
    run.process.kill()
    assert all(run.is_dead(name) for name in ("0", "1"))


def test_first_host_starts_the_master(tmp_path: Path, ssh_log: Path) -> None:
    script = _script(
        tmp_path,
        "import os\n"
        "from pccl import Communicator\n"
        "with Communicator() as comm:\n"
        "    comm.wait_for_peers(2)\n"
        "    print('met as', os.environ['PCCL_RUN'])\n"
        "    comm.barrier()\n",
    )
    with socket.socket() as held:  # not listening, so that the master can listen there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        hosts = ("--hosts", "127.0.0.1,localhost", "-n", "1", "--listen", listen)
        done = ended("launch", *hosts, "--fail-fast", script)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"met as (script\.py-\w+)", done.stdout))) == 1
    assert sorted(line.partition(" met")[0] for line in done.stdout.splitlines()) == [
        "[127.0.0.1] [0]",
        "[localhost] [1]",
    ]


def test_unreachable_host_is_named(tmp_path: Path, ssh_log: Path) -> None:
    script = _script(tmp_path, "pass")
    done = _launch_and_wait("--hosts", "a,unreachable", "-n", "1", script)
    assert done.returncode == 255
    assert "[unreachable] no route to unreachable" in done.stderr
    assert "1 of 2 failed: [unreachable] code 255" in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--hosts", "a,b", "--nnodes", "2"], "leave out --nnodes"),
        (["--hosts", "a,,b"], "not a list of host names"),
        (["--hosts=-oProxyCommand=x"], "not a list of host names"),
    ],
)
def test_wrong_hosts(options: list[str], reason: str, command: Command) -> None:
    done = command("launch", "--master", "nowhere:1", *options, "script.py")
    assert done.returncode == 2
    assert reason in done.stderr
