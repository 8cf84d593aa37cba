"""NeMo Gym, unchanged, as a driver of sessions (`--agent-sessions`): its model, agent and resources servers."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.environments.agents.exchange import Reply
from megarl.environments.pool import Asked, Event
from megarl.environments.turn_parsing import parse_turn
from tests.helpers import agent_programs
from tests.helpers.engine_records import asked_and_written, generated, recorded, turns_in_rows
from tests.helpers.open_sessions import LOGPROBS, PROMPT, TOKENS, open_sessions
from tests.helpers.programs import metrics, program, rl_argv
from tests.helpers.session_driver import free_port
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.nightly
HERE = Path(agent_programs.__file__).parent
CALL = '<think>so</think>Look. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
SCRIPTS = {
    "game": ["<think>so</think>4", "6", "it is 5"],
    "tool": [CALL, "It is cold."],
    "responses": [CALL, "It is cold."],
}
SEEN = {
    "game": ["2+3=", "4", "and?", "6", "so?"],
    "tool": ["2+3=", "Look.", '{"city":"Rome","weather_description":"The weather in Rome is cold."}'],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment with the package."""
    folder = tmp_path_factory.mktemp("nemo_gym")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "-q", "nemo-gym>=0.4,<0.5"], check=True)
    return folder / "bin/python"


@contextlib.contextmanager
def driver(python: Path, url: str, out: Path, kind: str) -> Iterator[subprocess.Popen]:
    """NeMo Gym's servers, and who asks them to play."""
    process = subprocess.Popen([python, HERE / "nemo_gym_driver.py", url, out, kind], cwd=out.parent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def results(out: Path) -> list[dict]:
    """What NeMo Gym has of each episode."""
    return [json.loads(line) for line in out.read_text().splitlines()]


def turns(found: dict) -> list[dict]:
    """The items of the policy's turns in a result: those that have tokens."""
    return [item for item in found["output"] if item.get("generation_token_ids")]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_policy_that_knows_the_task_solves_it(kind, python, tmp_path):
    asks = []
    with open_sessions(api_keys=()) as leader, driver(python, leader.url, tmp_path / "out.jsonl", kind):
        leader.offer(0)
        while not isinstance(came := leader.next(), Event):
            assert isinstance(came, Asked)
            text = SCRIPTS[kind][len(asks)]
            turn = parse_turn(text, len(asks), leader.pool.form, came.ask.tools or (), text)
            asks.append(came.ask)
            reply = Reply(turn, prompt=PROMPT, tokens=TOKENS, logprobs=LOGPROBS)
            leader.pool.reply(came.number, came.ticket, came.request, reply)
    assert came.failure is None and came.observation.reward == 1.0
    seen = [message["content"] for message in asks[-1].messages]
    assert seen == SEEN.get(kind, SEEN["tool"]) and len(asks) == len(SCRIPTS[kind])
    (found,) = results(tmp_path / "out.jsonl")
    tokens = [
        {name: item[name] for name in item if name.startswith(("prompt_", "generation_"))} for item in turns(found)
    ]
    assert tokens == len(asks) * [
        {"prompt_token_ids": PROMPT, "generation_token_ids": TOKENS, "generation_log_probs": LOGPROBS}
    ]


@pytest.mark.parametrize("kind", ["game", "responses"])
def test_what_is_trained_on_is_what_nemo_gym_has_seen(kind, python, tmp_path):
    from megarl import train_rl  # noqa: F401  imported once, before the fork

    port, out = free_port(), tmp_path / "out.jsonl"
    (tmp_path / "template.jinja").write_text(agent_programs.TEMPLATE)
    flags = (
        f"--agent-sessions --port {port} --chat-template {tmp_path / 'template.jinja'}"
        " --max-turns 3 --max-turn-length 4 --max-prompt-length 400"
        " --max-response-length 100 --max-tokens-per-microbatch 600 --rollout-max-requests 16 --environment-timeout 300"
        " --train-iters 2 --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --save-rollouts"
        " --save-interval 1 --advantage rloo --kl-coefficient 0"
    )
    parsed = program("rl", rl_argv(tmp_path / "run", flags), 1)
    with driver(python, f"http://127.0.0.1:{port}", out, kind) as process:
        run_world(recorded, 1, parsed, tmp_path / "seen.json")
        assert process.wait(60) == 0
    rows = metrics(tmp_path / "run")
    assert set(rows) == {1, 2} and len(results(out)) == 8
    rollouts = [fields for step in (1, 2) for fields in generated(tmp_path / "run", step).values()]
    trained = sorted(list(turn) for fields in rollouts for turn in turns_in_rows(*fields))
    theirs = [item for found in results(out) for item in turns(found)]
    seen = sorted([item["prompt_token_ids"], item["generation_token_ids"]] for item in theirs)
    assert trained == seen == asked_and_written(tmp_path / "seen.json")
    assert len(seen) >= 8 * (3 if kind == "game" else 1)
    logprobs = sorted(
        value for _, values, mask, *_ in rollouts for value, is_own in zip(values, mask, strict=True) if is_own
    )
    assert logprobs == pytest.approx(sorted(value for item in theirs for value in item["generation_log_probs"]), abs=0)
    for row in rows.values():
        assert row["environment/failures"] == 0 and row["rollout/logprob_gap_max"] == 0
        assert row["actor/ppo_kl_first"] == 0
