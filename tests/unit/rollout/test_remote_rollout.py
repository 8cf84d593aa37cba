"""A program whose responses a server generates: the bytes of one that generates them itself."""

import json

import pytest

from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import inputs
from tests.helpers.server.servers import (
    serve_argv,
    served,
)
from tests.helpers.tiers import by_default

EPISODES = "--environment tests.helpers.envs.{} --max-turns 3 --max-turn-length 4 --max-response-length 18"


EVALUATED = {  # flags of an evaluation that asks a server
    "one turn": "--top-k 5", "stop strings": '--stop ["7","1+"] --stop-token-ids 6',
    "an environment": EPISODES.format("sum_environments:Sums"), "an agent": EPISODES.format("agents:late_sums"),
    "an agent with its own stop strings": EPISODES.format("agents:stopping"),
    "files with limits and rewards": "--evals short=FOLDER/short.yaml",
    "files with environments": EPISODES.format("sum_environments:Sums") + " --evals played=FOLDER/played.yaml",
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(EVALUATED, ("an agent with its own stop strings",)))
def test_evaluate_gives_the_same_bytes_with_a_server(case, tmp_path):
    flags = f"--eval-responses 2 --eval-temperature 0.8 {EVALUATED[case].replace('FOLDER', str(tmp_path))}"
    entry = f"{{}}:\n  prompts: {inputs() / 'heldout.jsonl'}\n  {{}}\n"
    short = entry.format("a", "max-response-length: 2") + entry.format("b", "reward: length+exact-match")
    played = entry.format("a", "environment: tests.helpers.envs.agents:sums") + entry.format(
        "b", "max-prompt-length: 6"
    )
    (tmp_path / "short.yaml").write_text(short)
    (tmp_path / "played.yaml").write_text(played)
    run_evaluate(evaluate_argv(tmp_path / "own", flags))
    with served(serve_argv("--max-response-length 40")) as running:
        argv = evaluate_argv(tmp_path / "remote", f"{flags} --rollout-server {running.url}")
        at = argv.index("--load")
        run_evaluate(argv[:at] + argv[at + 2 :], 2)
        own, other = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("own", "remote"))
        assert own == other
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "remote")]
    assert results[0]["metrics"] == results[1]["metrics"] and results[1]["rollout_server"].startswith("http://127")
