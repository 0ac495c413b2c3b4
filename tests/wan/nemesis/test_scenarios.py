"""Scenarios and mixtures are what they say; short ones are played."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wan.nemesis.faults import Cut, Vanish, both_ways
from tests.wan.nemesis.mixtures import mixture
from tests.wan.nemesis.scenarios import SCENARIOS
from tests.wan.nemesis.stage import Setting
from tests.wan.nemesis.supervisor import Supervisor, Timed


def test_scenarios_follow_from_seed() -> None:
    assert len(SCENARIOS) >= 20
    for each in [*SCENARIOS.values(), mixture(3, 60), mixture(4, 60)]:
        timed = each.timed(7)
        assert timed == each.timed(7)
        assert timed
        assert each.text
        for one in timed:
            assert one.fault.hosts() <= set(range(each.setting.hosts))
            assert str(one.fault)
    assert mixture(3, 60).timed(3) != mixture(4, 60).timed(4)


@pytest.mark.slow
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    "timed",
    [
        pytest.param(Timed(0.5, 4.0, Cut(both_ways([1], [0, 2, 3]))), id="partition"),
        pytest.param(Timed(0.5, 1.0, Vanish(2)), id="vanish"),
    ],
)
def test_short_scenario(timed: Timed, tmp_path: Path) -> None:
    setting = Setting(peers=3, peer_timeout_s=2.0)
    outcome = Supervisor(setting, [timed], 5.0, seed=1, folder=tmp_path, say=print).run()
    assert [str(each) for each in outcome.violations] == []
    assert outcome.counts.ops > 0
