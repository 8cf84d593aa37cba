"""Environments are made once before a run, in a process of their own."""

import pytest

from megarl import plugins
from megarl.environments import ENVIRONMENTS
from megarl.environments.loading import check_factories
from megarl.errors import UsageError

ODD = "tests.helpers.envs.odd_environments"


def test_it_tells_who_answers():
    agent = "tests.helpers.envs.agents:sums"
    found = check_factories(["guess-number", "calculator", f"{ODD}:Child", agent])
    assert found == {"guess-number": "user", "calculator": "tool", f"{ODD}:Child": "user", agent: "agent"}


@pytest.mark.parametrize("name, said", [
    ("chess", f"--environment chess: unknown; allowed: {', '.join(ENVIRONMENTS)}, or a plug-in as {plugins.FORMS}"),
    ("no.module:make", "--environment no.module:make: cannot import no.module: ModuleNotFoundError: No module named"
                       " 'no'"),
    (f"{ODD}:nothing", f"--environment {ODD}:nothing: {ODD} has no nothing; a function is needed"),
    (f"{ODD}:Plays", f"--environment {ODD}:Plays: cannot be made: TypeError: Plays.__init__() missing 1 required"
                     " positional argument: 'environment'"),
    ("json:loads", "--environment json:loads: cannot be made: TypeError: loads() missing 1 required positional"
                   " argument: 's'"),
    (f"{ODD}:Yields", f"--environment {ODD}:Yields: cannot be made: TypeError: Yields.step yields; it returns its"
                      " result"),
    ("builtins:dict", "--environment builtins:dict: cannot be made: TypeError: dict lacks reset, step, restore, close"
                      " of the protocol"),
])  # fmt: skip
def test_what_cannot_be_made_is_one_line(name, said):
    with pytest.raises(UsageError) as raised:
        check_factories(["guess-number", name])
    assert str(raised.value) == said
