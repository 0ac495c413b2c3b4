"""What users read when a call of a process group fails."""

import re

import pytest

pytest.importorskip("torch")

from pccl.errors import PCCLError
from pccl.torch.errors import Names
from pccl.types import Result


def names(*processes: str) -> Names:
    made = Names("the default group", 0, [10, 11, 12], processes)
    made.number([3, 5, 4])
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peer 5 has left", "rank 11 has left"),
        ("waited for peers 5 (vm:70), 4 (vm:71), which", "waited for rank 11 (vm:70), rank 12 (vm:71), which"),
        ("peer 5 (vm:70, rank 11), peer 9 (vm:7, rank 1)", "rank 11 (vm:70), peer 9 (vm:7, rank 1)"),
        ("peers 3 and 4 are here", "rank 10 and rank 12 are here"),
        ("peer 5, 30 s ago", "rank 11, 30 s ago"),
        ("peer 99 (vm:1) is another job's", "peer 99 (vm:1) is another job's"),
    ],
)
def test_peers_named_as_ranks(text: str, expected: str) -> None:
    assert names().ranks_in(text) == expected


def test_lost_master_names_rank() -> None:
    said = "no master has taken over within 5 s. The links with peers 4 (vm:70), 5 (vm:71) were lost, too: reset"
    error = names("a:1", "b:2", "c:3").failure(
        "allreduce", PCCLError(Result.MASTER_CONNECTION_FAILED, "allreduce", said)
    )
    assert "The links with rank 12 (c:3), rank 11 (b:2) were lost, too: reset; this process group" in str(error)


def test_timeout_text_as_in_c10d() -> None:
    error = names().failure("barrier", PCCLError(Result.TIMEOUT, "barrier", "peer 5 has not called it"))
    assert re.search(" (Timed out|closed|timeout) ", str(error))
    assert "rank 11 has not called it" in str(error)
