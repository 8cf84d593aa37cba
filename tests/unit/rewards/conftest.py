"""The verifiers of an expression with rewards of `moody_rewards.py`."""

import pytest

from megarl.flags.settings import Settings
from megarl.rewards.chosen_verifiers import build_verifiers
from tests.helpers.envs.moody_rewards import PLUG_IN


@pytest.fixture
def build(plug_ins):
    (plug_ins / "moody_rewards.py").write_text(PLUG_IN)
    built = []

    def make(reward: str, workers: int = 0, timeout: float = 1.0, **flags):
        flags |= {"reward_workers": workers, "reward_timeout": timeout, "reward_fallback": -2.0}
        built.append(build_verifiers(Settings(reward=reward, **flags)))
        return built[-1]

    yield make
    for verifiers in built:
        verifiers.close()
