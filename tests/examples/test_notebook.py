"""The notebook runs from top to bottom, and interrupted cells leave a kernel that continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cluster import WAIT_S, Background, Cluster, ones

pytestmark = pytest.mark.slow
nbclient = pytest.importorskip("nbclient", reason="pip install '.[notebook]' has what runs notebooks")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def test_the_notebook_runs_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=int(WAIT_S), kernel_name="python3").execute()
    texts = [
        output.get("text") or output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    shown = "\n".join(texts)
    assert "3 peers: y = 3.0 x + 1.0" in shown
    assert "2 peers: y = 3.0 x + 1.0" in shown
    assert "<Communicator 127.0.0.1:" in shown
    assert "ReduceInfo(world_size=2" in shown
    assert ": stopped>" in texts[-1]


class Kernel:
    """A Jupyter kernel that runs cells and can be interrupted."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str, while_it_waits: Callable[[], Any] = lambda: None) -> tuple[str, str]:
        """Run a cell, and return what it has printed and the name of the error that ended it, if one did."""
        message = self.client.execute(code)
        printed, error, is_waiting = "", "", False
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            found = self.client.get_iopub_msg(timeout=WAIT_S)
            if found["parent_header"].get("msg_id") != message:
                continue
            kind, content = found["msg_type"], found["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error
            if "waits" in printed and not is_waiting:
                is_waiting = True
                while_it_waits()
        raise AssertionError(f"the cell has not ended: {printed}")

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


# Prints a word as soon as the communicator waits in a call.
WATCH = """
import threading, time
def watch():
    session = comm._inner._session
    while not (session.ops.table or len(session._calls) or session._fast_path.running):
        time.sleep(0.001)
    print("waits", flush=True)
threading.Thread(target=watch).start()
"""

CELLS = {
    "blocking": ("Communicator", ""),
    "asyncio": ("AsyncCommunicator", "await "),
}


@pytest.mark.parametrize("kind", CELLS)
def test_interrupted_cells_leave_a_kernel_that_goes_on(kind: str, kernel: Kernel, cluster: Cluster) -> None:
    name, wait = CELLS[kind]
    (other,) = cluster.join(1)

    def works() -> None:
        x = np.ones(4, np.float32)
        reducing = Background(partial(other.all_reduce, x, tag=9))
        code = f"x = np.ones(4, np.float32); info = {wait}comm.all_reduce(x, tag=9); print(info.world_size, x[0])"
        assert kernel.run(code) == ("2 2.0\n", "")
        reducing.result()
        assert x[0] == 2

    code = f"import numpy as np\nfrom pccl import {name}\ncomm = {name}({cluster.address!r})\n{wait}comm.connect()"
    joining = Background(partial(other.wait_for_peers, 2, timeout=WAIT_S))
    assert kernel.run(code) == ("", "")
    assert joining.result() == 2
    works()

    calls = [
        "comm.all_reduce(y, tag=3)",
        "comm.wait_for_peers(3)",
        "comm.update_topology()",
        "comm.recv(y, src=0, tag=4)",
    ]
    for call in calls:
        code = f"y = np.ones(4, np.float32)\n{WATCH}\n{wait}{call}"
        _, error = kernel.run(code, kernel.interrupt)
        assert error in ("KeyboardInterrupt", "CancelledError"), call
        assert kernel.run("print(y)")[0] == "[1. 1. 1. 1.]\n"
        assert kernel.run("print(comm.world_size)") == ("2\n", "")
        works()

    handle = f"handle = comm.all_reduce_async(y, tag=5)\n{WATCH}\nawait handle"
    assert kernel.run(f"y = np.ones(4, np.float32)\n{handle}", kernel.interrupt)[1] in (
        "KeyboardInterrupt",
        "CancelledError",
    )
    reducing = Background(partial(other.all_reduce, ones(4), tag=5))
    assert kernel.run("print((await handle).world_size, y[0])") == ("2 2.0\n", "")
    reducing.result()
    assert kernel.run(f"{wait}comm.close()") == ("", "")
