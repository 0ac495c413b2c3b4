"""`pccl master` as a process, and the face of the `pccl` command."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from pccl import Communicator, PCCLError
from pccl.status import run_status
from tests.conftest import Command
from tests.support.cluster import Background, ones, together, until
from tests.support.commands import ended, pccl

TIMEOUT_S = 60.0
READY = "pccl master listening on "


@contextmanager
def _master(listen: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running master and the address that it prints."""
    with ExitStack() as resources:
        process = pccl("master", "--listen", listen, *options)
        resources.enter_context(process)
        resources.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY), process.communicate(timeout=TIMEOUT_S)
        yield process, line.removeprefix(READY).removesuffix("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(number: signal.Signals) -> None:
    with _master("127.0.0.1:0") as (process, address):
        host, port = address.rsplit(":", 1)
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), TIMEOUT_S):
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stderr
    assert stdout == ""
    assert "Traceback" not in stderr


def test_invalid_peer_timeout(command: Command) -> None:
    done = command("master", "--listen", "127.0.0.1:0", "--peer-timeout", "0")
    assert done.returncode == 1
    assert "peer_timeout '0.0' is not a number within" in done.stderr


def test_a_token_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    with _master("127.0.0.1:0", "--token-file", str(path)) as (_, address):
        with Communicator(address, token="secret", timeout=TIMEOUT_S) as peer:
            assert peer.world_size == 1
        with pytest.raises(PCCLError, match="a different token"):
            Communicator(address, token="guess", timeout=TIMEOUT_S).connect()


def test_http() -> None:
    with _master("127.0.0.1:0", "--http", "127.0.0.1:0") as (process, _):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("pccl master shows the run at http://127.0.0.1:")
        with urllib.request.urlopen(line.split()[-1] + "healthz", timeout=TIMEOUT_S) as response:
            assert response.read() == b"ok\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert stderr == ""


def test_http_host() -> None:
    options = ("--http", "127.0.0.1:0", "--http-host", "runs.example", "--http-host", "runs")
    with _master("127.0.0.1:0", *options) as (process, _):
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        for host in ("runs.example", "runs:80"):
            request = urllib.request.Request(f"{url}status.json", headers={"Host": host})
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                assert response.status == 200
        request = urllib.request.Request(f"{url}status.json", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=TIMEOUT_S)


def test_tls() -> None:
    certificates = Path(__file__).parents[1] / "certificates"
    options = ("--tls-cert", str(certificates / "master.pem"), "--tls-client-ca", str(certificates / "ca.pem"))
    with _master("localhost:0", *options) as (_, address):
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        with pytest.raises(PCCLError, match="TLS"):
            Communicator(address, ssl_context=context, timeout=TIMEOUT_S).connect()
        context.load_cert_chain(certificates / "client.pem")
        with Communicator(address, ssl_context=context, timeout=TIMEOUT_S) as peer:
            assert peer.world_size == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tls-cert", "nowhere.pem"], "nowhere.pem"),
        (["--tls-cert", __file__], __file__),
        (["--tls-key", "nowhere.pem"], "--tls-cert"),
        (["--tls-client-ca", "nowhere.pem"], "--tls-cert"),
    ],
)
def test_invalid_tls_options(options: list[str], named: str, command: Command) -> None:
    done = command("master", *options)
    assert done.returncode == 1
    assert named in done.stderr


def test_invalid_token_file(tmp_path: Path, command: Command) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path in (empty, tmp_path / "absent"):
        done = command("master", "--listen", "127.0.0.1:0", "--token-file", str(path))
        assert done.returncode == 1
        assert str(path) in done.stderr


@pytest.mark.parametrize("listen", ["localhost:0", "0.0.0.0:0", "[::1]:0"])
def test_names_and_addresses(listen: str) -> None:
    if listen.startswith("[") and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with _master(listen) as (_, address):
        port = int(address.rsplit(":", 1)[1])
        dialled = "::1" if listen.startswith("[") else "localhost"
        socket.create_connection((dialled, port), TIMEOUT_S).close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        done = ended("master", "--listen", address)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("pccl master: ")
    assert address in done.stderr


@pytest.mark.parametrize("listen", ["127.0.0.1:70000", "127.0.0.1:x", "[::1", "", "48150"])
def test_malformed_address(listen: str, command: Command) -> None:
    done = command("master", "--listen", listen)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("pccl master: ")
    assert "INVALID_ARGUMENT" not in done.stderr


def test_version(command: Command) -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"pccl {version('pccl-collectives')}\n")


def test_help_names_every_command(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0
    for command in ("master", "launch", "demo", "bench"):
        assert f"\n    {command} " in done.stdout


def test_help_loads_no_heavy_module() -> None:
    code = (
        "import sys\n"
        "from pccl.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    heavy = {'rich', 'torch', 'matplotlib', 'pccl.tools.bench.local', 'pccl.tools.launch'}\n"
        "    print('LOADED', *sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_warnings_are_shown_by_default(tmp_path: Path) -> None:
    """Here that the run stands still, for its record cannot be written."""
    state = tmp_path / "state"
    with _master("127.0.0.1:0", "--state", str(state), "--found") as (process, address):
        shutil.rmtree(state)
        with pytest.raises(PCCLError), Communicator(address, timeout=1.0):
            pass
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert f"the run pauses until its state can be written to {state}" in stderr


# The state directory of a master at a fixed port.


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which masters keep their records where nobody says otherwise."""
    monkeypatch.delenv("PCCL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def _ends(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """End a master, and return what it has written to stderr."""
    process.send_signal(number)
    return process.communicate(timeout=TIMEOUT_S)[1]


def _default_directory(state_home: Path, address: str) -> Path:
    return state_home / "pccl" / f"master-{socket.gethostname()}-{address.split(':')[1]}"


def test_first_start_at_fixed_port_starts_run_at_once(state_home: Path, nobody: str) -> None:
    with _master(nobody) as (process, _):
        with Communicator(nobody, timeout=TIMEOUT_S) as peer:
            assert peer.world_size == 1
            assert (_default_directory(state_home, nobody) / "master.json").exists()
        assert _ends(process) == ""
    # Its only peer has left that run, so the next one starts at once, too.
    with _master(nobody) as (process, _):
        with Communicator(nobody, timeout=TIMEOUT_S) as peer:
            assert peer.world_size == 1
        assert _ends(process) == ""


def test_killed_master_continues_run_from_default_directory(state_home: Path, nobody: str) -> None:
    with _master(nobody) as (process, _):
        peer = Communicator(nobody, timeout=TIMEOUT_S, master_timeout=TIMEOUT_S)
        peer.connect()
        run = run_status(nobody).run
        process.kill()
        process.wait()
    with _master(nobody):
        peer.update_topology()
        assert run_status(nobody).run == run
        peer.close()


@pytest.mark.parametrize("how", ["--state none", "PCCL_STATE=", "PCCL_STATE=none", "port 0", "--standby-of"])
def test_no_state_is_kept(
    state_home: Path, monkeypatch: pytest.MonkeyPatch, how: str, new_port: Callable[[], int]
) -> None:
    address = "127.0.0.1:0" if how == "port 0" else f"127.0.0.1:{new_port()}"
    options = {"--state none": ["--state", "none"], "--standby-of": ["--standby-of", f"127.0.0.1:{new_port()}"]}.get(
        how, []
    )
    if how.startswith("PCCL_STATE"):
        monkeypatch.setenv("PCCL_STATE", how.partition("=")[2])
    with _master(address, *options, "--found") as (process, _):
        _ends(process)
    assert not state_home.exists()
    assert not Path("none").exists()


@pytest.mark.parametrize("obstacle", ["a file", "another master", "no record"])
def test_unusable_default_directory_is_skipped(state_home: Path, obstacle: str, nobody: str) -> None:
    directory = _default_directory(state_home, nobody)
    with ExitStack() as resources:
        if obstacle == "a file":
            state_home.touch()
        elif obstacle == "no record":
            directory.mkdir(parents=True)
            (directory / "master.json").write_text("{")
        else:
            resources.enter_context(_master("127.0.0.1:0", "--state", str(directory)))
        process, _ = resources.enter_context(_master(nobody))
        stderr = _ends(process)
    assert "this master keeps no durable state: " in stderr
    assert str(state_home) in stderr
    assert "--state" in stderr
    assert len(stderr.splitlines()) == 1


def test_unusable_state_directory_is_an_error(state_home: Path, command: Command, nobody: str) -> None:
    state_home.touch()
    done = command("master", "--listen", nobody, "--state", str(state_home / "x"))
    assert done.returncode == 1
    assert "cannot keep state in" in done.stderr


PUPPET = """
import sys
from pccl import Communicator
peer = Communicator(sys.argv[1], name="the lost one")
peer.connect()
peer.wait_for_peers(3)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_restarted_master_says_which_peers_are_back(
    state_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nobody: str
) -> None:
    monkeypatch.setattr("pccl.protocol.wait_reasons.FIRST_S", 0.2)
    monkeypatch.setattr("pccl.protocol.wait_reasons.GROWTH", 1.2)
    where = nobody, "--peer-timeout", "10"
    peers = [Communicator(nobody, timeout=TIMEOUT_S, master_timeout=TIMEOUT_S) for _ in range(2)]
    with ExitStack() as resources:
        process, _ = resources.enter_context(_master(*where))
        puppet = subprocess.Popen(
            [sys.executable, "-c", PUPPET, nobody], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        resources.enter_context(puppet)
        resources.callback(puppet.kill)
        together([partial(_join, peer, 3) for peer in peers])
        assert puppet.stdout is not None
        assert puppet.stdout.readline() == "ready\n"
        waiting = [Background(partial(peer.all_reduce, ones())) for peer in peers]
        for killed in (process, puppet):
            killed.kill()
            killed.wait()
    says = r"master restarted; 2 of 3 peers are back; waiting for peer \d \(the lost one\), \d+ s left"
    with caplog.at_level("WARNING", "pccl"), _master(*where):
        until(lambda: re.fullmatch(says, run_status(nobody).recovery), "the status says so")
        caplog.clear()
        assert run_status(nobody).role == "recovering"
        warning = rf"an op has waited \d+ s for the run's master \({says}\); "
        until(lambda: any(re.match(warning, text) for text in caplog.messages), "a peer warns")
        assert not [text for text in caplog.messages if "for peer" in text.partition("(")[0]]
        for each in waiting:
            assert "(the lost one) was lost" in str(each.outcome())
        assert [info.world_size for info in together([partial(peer.all_reduce, ones()) for peer in peers])] == [2, 2]
        until(lambda: run_status(nobody).recovery == "", "it leads")
        until(lambda: any("a master leads the run again, after " in text for text in caplog.messages), "peers say so")
        together([peer.close for peer in peers])


def _join(peer: Communicator, world: int) -> None:
    peer.connect()
    peer.wait_for_peers(world)


def test_hold_of_recorded_run_names_option(state_home: Path, nobody: str) -> None:
    with _master(nobody) as (process, _):
        peer = Communicator(nobody, timeout=TIMEOUT_S, master_timeout=0.1)
        peer.connect()
        process.kill()
        process.wait()
        with pytest.raises(PCCLError):
            peer.update_topology()
        peer.close()
    with _master(nobody) as (process, _):
        newcomer = Background(lambda: Communicator(nobody, timeout=2.0).connect())
        text = str(newcomer.outcome())
        stderr = _ends(process)
    waits = r"the peers of run \w+ in term 1, view 1, peers \[1\], for \d+ s more, or 5 s once most of them are back; "
    waits += "if it is over, `pccl master --start new` skips this"
    assert re.search(rf"it holds newcomers: it waits for {waits}", text)
    assert re.search(rf"waits for {waits}", stderr)
    assert re.search(rf"a newcomer from 127.0.0.1 is held: this master waits for {waits}", stderr)
