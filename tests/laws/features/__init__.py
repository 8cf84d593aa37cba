"""The table of features: each row is a small run with one feature, and other layouts of it. `test_laws.py` holds that a
resume, a layout, a kill, a replay or a neutral flag changes nothing of it."""

from tests.laws.features.data import DATA
from tests.laws.features.episodes import EPISODES_OF
from tests.laws.features.loop import LAGS, LOOP
from tests.laws.features.models import MODELS
from tests.laws.features.others import OTHERS

FEATURES = LOOP | DATA | LAGS | MODELS | EPISODES_OF | OTHERS
# What changes no byte of the samples, and no number of the updates.
NEUTRAL = (
    "--token-samples 0", "--deterministic", "--rollout-max-requests 3", "--rollout-dispatch static",
    "--rollout-prefix-caching", "--speculative-rollout", "--rollout-chunked-prefill", "--async-save", "--save-memory",
    "--reward-workers 1", "--ema-decay 0.9", "--mtp-train --mtp-drafts", "--save-rollouts",
    "--keep-responses false",
)  # fmt: skip
