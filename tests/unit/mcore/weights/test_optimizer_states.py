"""States of optimizers from checkpoints of other kinds: each group takes what it lacks, and the flags' rates stay."""

from types import SimpleNamespace

import pytest

from megarl.mcore.weights import optimizer_states


class Optimizer:
    """Of these chained ones, by the groups of each; it keeps what it loads."""

    def __init__(self, *groups: list[dict]):
        self.chained_optimizers = [SimpleNamespace(param_groups=of_one) for of_one in groups]

    def load_state_dict(self, state):
        self.state = state


def group(kind: str, wd_mult: float, **more) -> dict:
    return {"optimizer": kind, "wd_mult": wd_mult, "params": [0], **more}


def loaded(plain: dict, form: dict) -> dict:
    return {"optimizer_plain": plain, "optimizer_form": form, "optimizer": {}}


def plain(*groups: dict, **more) -> dict:
    return {"optimizer": {"param_groups": dict(enumerate(groups))}, **more}


def test_counters_come_from_the_checkpoint_and_rates_from_the_flags():
    own = [group("adam", 1.0, lr=0.1), group("adam", 0.0, lr=0.2)]
    saved = plain(group("adam", 0.0, lr=9.0, step=7), group("adam", 1.0, lr=9.0, step=7), grad_scaler=5)
    optimizer = Optimizer(own)
    form = plain({}, {}, grad_scaler=1)
    optimizer_states.restore(loaded(saved, form), optimizer)
    groups = optimizer.state["optimizer"]["param_groups"]
    assert isinstance(groups, list)
    assert [(g["lr"], g["step"], g["wd_mult"]) for g in groups] == [(0.1, 7, 1.0), (0.2, 7, 0.0)]
    assert optimizer.state["grad_scaler"] == 5


@pytest.mark.parametrize("steps", [(0, 7), (7, 0)])
def test_one_optimizer_is_loaded_into_two_of_their_own_kinds(steps):
    """The group of a rank without its parameters counts no updates; those of another optimizer do not count."""
    saved = plain(*(group("adam", 1.0, step=step) for step in steps), group("muon", 1.0, step=9))
    optimizer = Optimizer([group("muon", 1.0)], [group("adam", 1.0)])
    form = {0: plain({}), 1: plain({})}
    optimizer_states.restore(loaded(saved, form), optimizer)
    found = [optimizer.state[i]["optimizer"]["param_groups"][0] for i in (0, 1)]
    assert [(each["optimizer"], each["step"]) for each in found] == [("muon", 9), ("adam", 7)]


def test_padding_counts_only_while_states_are_described():
    bucket = SimpleNamespace(numel_unpadded=5, grad_data=SimpleNamespace(numel=lambda: 8))
    buffer = SimpleNamespace(numel_unpadded=5, numel=8, buckets=[bucket])
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(buffers=[buffer])])
    with pytest.raises(KeyError), optimizer_states.described(optimizer):
        assert (buffer.numel_unpadded, bucket.numel_unpadded) == (8, 8)
        raise KeyError
    assert (buffer.numel_unpadded, bucket.numel_unpadded) == (5, 5)


def test_fp32_parameters_are_described_beside_those_of_16_bits():
    half, main, whole = object(), object(), object()
    part = SimpleNamespace(
        float16_groups=[[half]],
        fp32_from_float16_groups=[[main]],
        fp32_from_fp32_groups=[[whole]],
        optimizer=SimpleNamespace(param_groups=[{"params": [main, whole]}]),
    )
    with optimizer_states.described(SimpleNamespace(chained_optimizers=[part])):
        assert part.float16_groups == [[half, whole]] and part.fp32_from_float16_groups == [[main, whole]]
    assert part.float16_groups == [[half]] and part.fp32_from_float16_groups == [[main]]
