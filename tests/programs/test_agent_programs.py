"""Programs of others, unchanged, as agents of a run: Anthropic's SDK, smolagents and mini-swe-agent."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.confine.agent_sandbox import ProgramSandbox
from megarl.environments.agents.program import ProgramEnvironment
from tests.helpers.envs import agent_programs, odd_agents
from tests.helpers.programs import metrics, program, rl_argv
from tests.helpers.rollout.engine_records import asked_and_written, generated, recorded, turns_in_rows
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.nightly
HERE = Path(agent_programs.__file__).parent
PACKAGES = ["anthropic>=2,<3", "smolagents[openai]>=1.26,<2", "mini-swe-agent>=2.4,<3"]
BROKEN, TESTED = "def add(a, b):\n    return a - b\n", "from sums import add\nassert add(1, 2) == 3\n"
FIX = "sed -i 's/a - b/a + b/' sums.py && python test_sums.py && echo passed"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CALL = '<tool_call>{{"name": "bash", "arguments": {{"command": "{}"}}}}</tool_call>'


@pytest.fixture(scope="module")
def clients(tmp_path_factory) -> Path:
    """Folder of the programs of an environment with the packages."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    folder.chmod(0o755)  # root's programs run as another user in their sandbox
    subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES], check=True)
    return folder / "bin"


def agents(clients: str) -> dict:
    """Name -> factory of the agent."""
    python, asked = f"{clients}/python", lambda run: float("asked" in run.output or "answer" in run.output)

    def prepare(task, folder):
        (folder / "sums.py").write_text(BROKEN)
        (folder / "test_sums.py").write_text(TESTED)

    def fixed(run) -> float:
        return float("a + b" in (run.workspace / "sums.py").read_text())

    quiet = {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}
    task = "Fix sums.py so that test_sums.py passes. {prompt}"
    mini = [f"{clients}/mini", "-t", task, "-m", "openai/policy", "--yolo", "--exit-immediately"]
    commands = {
        "anthropic": [python, str(HERE / "anthropic_agent.py"), "{prompt}"],
        "smol tools": [python, str(HERE / "smol_agent.py"), "{prompt}", "tools"],
        "smol code": [python, str(HERE / "smol_agent.py"), "{prompt}", "code"],
    }
    sandbox = ProgramSandbox(readable=[Path(clients).parent])
    made = {
        name: functools.partial(ProgramEnvironment, command, asked, sandbox=sandbox)
        for name, command in commands.items()
    }
    mini_agent = functools.partial(ProgramEnvironment, mini, fixed, prepare, quiet, sandbox=sandbox)
    return made | {"mini-swe-agent": mini_agent}


NAMES = ("anthropic", "smol tools", "smol code", "mini-swe-agent")


@pytest.fixture
def module(clients, tmp_path, monkeypatch):
    """A module of agents by their number, for processes that know the folder by this variable."""
    monkeypatch.setenv("MEGARL_TEST_CLIENTS", str(clients))
    names = "\n".join(f"agent_{i} = agents(os.environ['MEGARL_TEST_CLIENTS'])[{n!r}]" for i, n in enumerate(NAMES))
    (tmp_path / "their_agents.py").write_text(
        f"import os\nfrom tests.programs.test_agent_programs import agents\n{names}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "their_agents"


SCRIPTS = {
    "anthropic": ['<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', "43"],
    "smol tools": ['<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>'],
    "smol code": ["Thought: easy\n<code>\nfinal_answer(add(x=1, y=2))\n</code>"],
    "mini-swe-agent": [CALL.format(FIX), CALL.format(DONE)],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_knows_the_task_solves_it(name, module):
    pool = odd_agents.pool_of()
    try:
        event, asks = odd_agents.play(pool, f"{module}:agent_{NAMES.index(name)}", SCRIPTS[name], turns=4)
    finally:
        pool.close()
    assert event.failure is None and event.observation.reward == 1.0
    assert len(asks) == len(SCRIPTS[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_on_is_what_the_engine_has_written(name, module, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    (tmp_path / "template.jinja").write_text(agent_programs.TEMPLATE)
    flags = (
        f"--environment {module}:agent_{NAMES.index(name)} --chat-template {tmp_path / 'template.jinja'} --max-turns 3"
        " --max-turn-length 8 --max-prompt-length 20000 --max-response-length 20000 --max-observation-length 2000"
        " --max-tokens-per-microbatch 40000 --rollout-max-requests 4 --rollout-buffer-gb 0.5 --train-iters 2"
        " --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --save-rollouts --save-interval 1"
        " --advantage rloo --kl-coefficient 0"
    )
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    run_world(recorded, 1, parsed, tmp_path / "seen.json")
    rows = metrics(tmp_path / "run")
    assert set(rows) == {1, 2}
    seen = asked_and_written(tmp_path / "seen.json")
    trained = [list(turn) for step in (1, 2) for fields in generated(tmp_path / "run", step).values()
               for turn in turns_in_rows(*fields)]  # fmt: skip
    assert sorted(trained) == seen and len(seen) >= 8
    for row in rows.values():
        assert row["environment/failures"] == 0 and row["rollout/logprob_gap_max"] == 0
        assert row["actor/ppo_kl_first"] == 0 and row["environment/turns_mean"] > 1
