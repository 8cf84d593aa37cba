"""Entries of a config.json: the defaults of transformers' class, and a line for values that are no such thing."""

import pytest

from megarl.errors import UsageError
from megarl.mcore.weights.hf.model_config import MAX_LAYERS, ModelConfig


def config_of(longest: int = 64, **values) -> ModelConfig:
    return ModelConfig(values, "llama", longest, UsageError)


def test_entries_that_are_missing_are_those_of_the_class():
    config = config_of(hidden_size=96, rms_norm_eps=1e-5)
    assert (config.whole("hidden_size"), config.number("rms_norm_eps")) == (96, 1e-5)
    assert config.whole("absent", "num_hidden_layers") == config_of().get("num_hidden_layers") == 32
    assert config.is_known("mlp_bias") and not config.is_known("layer_types_of_nobody")
    assert config.items("absent", str, "names") == [] and config.switch("absent") is False


@pytest.mark.parametrize("read, says", [
    (lambda: config_of(hidden_size=0).whole("hidden_size"), "hidden_size 0: allowed is a whole number above 0"),
    (lambda: config_of(first=-1).whole("first", minimum=0), "first -1: allowed is a whole number of 0 or more"),
    (lambda: config_of(scale=float("inf")).number("scale"), "scale inf: allowed is a number of 0 or more"),
    (lambda: config_of(flag="yes").switch("flag"), "flag 'yes': allowed is true or false"),
    (lambda: config_of(kinds=["a", 1]).items("kinds", str, "names"), "kinds ['a', 1]: allowed is a list of names"),
    (lambda: config_of(act="gelu").require(act=("silu", None)), "act 'gelu': allowed is 'silu' or absent"),
    (lambda: config_of(longest=65, window=64).check_length("window", 64, ": why"),
     "window 64: allowed is a prompt and response of 64 tokens together at most: why"),
    (lambda: config_of(num_hidden_layers=MAX_LAYERS + 1), f"num_hidden_layers {MAX_LAYERS + 1}: allowed are at most"),
])  # fmt: skip
def test_what_is_refused(read, says):
    with pytest.raises(UsageError) as error:
        read()
    assert str(error.value).startswith(f"config.json: {says}") and "\n" not in str(error.value)
