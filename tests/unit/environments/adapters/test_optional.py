"""A package that is missing is one line, which says what to install."""

import sys

import pytest

from megarl.environments.adapters.gymnasium_env import FrozenLake
from megarl.environments.adapters.openenv_env import OpenEnvEnvironment
from megarl.environments.adapters.textarena_env import TextArenaEnvironment
from megarl.environments.adapters.verifiers_env import VerifiersEnvironment
from megarl.errors import UsageError


@pytest.mark.parametrize("make, modules, said", [
    (lambda: OpenEnvEnvironment("http://localhost"), ["websockets.asyncio.client"], "package websockets>=15 .*"),
    (FrozenLake, ["gymnasium"], "package gymnasium>=1.1,<2 .*"),
    (lambda: TextArenaEnvironment("X"), ["textarena"], "the game X needs the package textarena>=0.7,<0.8 .*"),
    (lambda: VerifiersEnvironment(None), ["verifiers", "verifiers.v1.configs.agent"], "package verifiers>=0.4,<0.5 "),
])  # fmt: skip
def test_without_the_package_one_line_says_what_to_install(make, modules, said, monkeypatch):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=said) as caught:
        make()
    assert "pip install '" in str(caught.value) and "\n" not in str(caught.value)
