"""What does not go with images in prompts, and a source of a store."""

import dataclasses
from types import SimpleNamespace

import pytest

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.trainers import image_inputs


def config(model_folder=None, role: str = "actor", **settings):
    plain = {"mtp_drafts": False, "predicts": False, "rollout_server": None, "environment": None}
    one = SimpleNamespace(name=role, megatron=SimpleNamespace(model_folder=model_folder))
    return SimpleNamespace(settings=SimpleNamespace(**plain | settings), with_models=lambda: [one], trained=("actor",))


@pytest.mark.parametrize(
    "given, needle",
    [
        ({"predicts": True}, "multi-token prediction (--mtp-drafts, --mtp-train) does not go with images"),
        ({"mtp_drafts": True}, "multi-token prediction (--mtp-drafts, --mtp-train) does not go with images"),
        ({"environment": "calculator"}, "--environment calculator: does not go with images in prompts yet"),
        ({"rollout_server": "http://x"}, "--rollout-server http://x: does not go with images in prompts"),
        ({"model_folder": "x"}, "actor: --model-source transformers does not go with images"),
        ({"role": "reward"}, "reward: its model reads prompts by a template of its own; images do not go with it"),
    ],
)
def test_what_does_not_go_with_images(given, needle):
    with pytest.raises(UsageError) as caught:
        image_inputs._check(config(**given))
    assert needle in str(caught.value)
    image_inputs._check(config())


def test_images_on_a_cuda_device_are_refused(monkeypatch):
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    with pytest.raises(UsageError, match="on a CUDA device they are not supported yet"):
        image_inputs._check(config())


@dataclasses.dataclass
class Known:
    """Images of a process that knows one."""

    key: int

    def of_token(self, token: int):
        return SimpleNamespace(width=96, height=64) if -(token + 1) >> 16 == self.key else None

    processor = SimpleNamespace(grid=lambda width, height: (1, height // 16, width // 16))


def test_sizes_come_from_headers_alone():
    tower = SimpleNamespace(size=lambda grid: (grid[0], grid[1] // 2, grid[2] // 2))
    source = image_inputs.TowerSource(Known(7), tower)
    assert source.size(7) == (1, 2, 3)
    with pytest.raises(RuntimeError, match="the image 0x8 of a token stream is in none of the run's data"):
        source.size(8)
