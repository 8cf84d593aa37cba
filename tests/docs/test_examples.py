"""Examples of the documentation: plug-ins, environments and agents run as printed, in programs."""

import asyncio
import math
import re
import subprocess
import sys

import pytest

from megarl import arguments
from megarl.data.images.decoding import decode
from megarl.environments.protocol import Task, parse_turn, seen_of
from megarl.errors import UsageError
from tests.helpers.envs.played_environments import play
from tests.helpers.envs.session_driver import free_port
from tests.helpers.pages import documents
from tests.helpers.programs import ROOT, environment, metrics, rl_argv, rows_of, train
from tests.helpers.tiers import long
from tests.helpers.waiting import SAFETY_SECONDS
from tools._metric_catalog import METRICS

DOCS = ROOT / "docs"


def test_the_plug_ins_of_extending_run_unchanged(tmp_path, plug_ins):
    """Two rewards, an estimator and a loss in one run, with the flags of the page."""
    text, _, _ = documents.text_of(DOCS / "extending.md").partition("## A policy loss as part of megarl")
    blocks = documents.blocks(text)
    code = "\n\n".join(block.text for block in blocks if block.language == "python")
    flags = [block.text.strip().removeprefix("... ") for block in blocks if block.text.startswith("... ")]
    assert len(flags) == len(re.findall("^def ", code, re.MULTILINE)) == 4
    (plug_ins / "my_plugins.py").write_text(code)
    train("rl", rl_argv(tmp_path, " ".join([*flags, "--train-iters 2"])))
    rows = metrics(tmp_path)
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert rows[2]["actor/grad_norm"] > 0 and "kl/reference" not in rows[2] and "critic/loss" not in rows[2]
    always = [m.name for m in METRICS if not m.when and "train_rl" in m.programs and "<" not in m.name]
    assert len(always) > 30 and set(always) <= set(rows[2])  # docs/metrics.md says so
    graded = rows_of(tmp_path, 1)
    assert {"my_plugins:contains_answer", "my_plugins:agreement"} == set(graded[0]["reward_values"])
    assert len({row["reward"] for row in graded}) > 1
    with pytest.raises(UsageError, match="--samples-per-prompt 1: .*rank_in_group compares"):
        arguments.parse(rl_argv(tmp_path, " ".join([*flags, "--samples-per-prompt 1"])), 1)


def test_the_environments_of_the_page_run_unchanged(tmp_path, plug_ins):
    """The game in a run, the tool with a turn that calls it, the images as a run gets them."""
    game, shop, square = (
        b.text for b in documents.blocks(documents.text_of(DOCS / "environments.md")) if b.language == "python"
    )
    (plug_ins / "nim.py").write_text(game)
    flags = "--environment nim:Nim --max-turns 3 --max-prompt-length 60 --max-response-length 150"
    train("rl", rl_argv(tmp_path, f"{flags} --max-tokens-per-microbatch 500 --train-iters 1"))
    assert metrics(tmp_path)[1]["environment/failures"] == 0 and len(game.splitlines()) <= 36
    found: dict = {}
    exec(shop, found)
    environment = found["shop"]()
    call = '<tool_call>{"name": "price", "arguments": {"article": "pear", "count": 2}}</tool_call>'
    task = Task([], answer="8")
    _, answers = play(environment, task, [parse_turn(text, i) for i, text in enumerate((call, " 8"))])
    assert answers[0].messages[0]["content"] == "8" and (answers[1].reward, answers[1].done) == (1.0, True)
    exec(square, found)
    turns = [parse_turn(text, number) for number, text in enumerate(("7", "70"))]
    first, answers = play(found["Square"](), Task([], seed=70), turns)
    seen, images = asyncio.run(seen_of(first))
    assert [decode(data).getpixel((9, 9)) for data in images.values()] == [(70, 70, 70)]
    assert answers[1].done and asyncio.run(seen_of(answers[0]))[1] == images and len(seen.messages) == 1


ASKS = (
    "import sys; from openai import OpenAI\n"
    "answer = OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
    "open('sums.py', 'a').write('    # ' + repr(answer.choices[0].message.content))\n"
)


@pytest.mark.parametrize("name, environment", [("guess", "guess:agent"), long(("fixer", "fixer:fixer"))])
def test_the_agents_of_the_page_run_unchanged(name, environment, tmp_path, plug_ins):
    blocks = [b.text for b in documents.blocks(documents.text_of(DOCS / "agents.md")) if b.language == "python"]
    for module, code in zip(("guess", "fixer"), blocks[:2], strict=True):
        (plug_ins / f"{module}.py").write_text(code)
    (plug_ins / "agent.py").write_text(ASKS)
    flags = f"--environment {environment} --max-turns 2 --max-prompt-length 60 --max-response-length 100"
    few = "--prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --train-iters 1"
    train("rl", rl_argv(tmp_path, f"{flags} --max-tokens-per-microbatch 500 {few}"))
    row = metrics(tmp_path)[1]
    assert row["environment/failures"] == 0 and row["agent/rows_per_episode"] == 1
    assert row["environment/turns_mean"] <= 2 and row["reward/mean"] < 0.01 + (name == "guess")


@pytest.mark.long
def test_the_driver_of_the_page_runs_unchanged(tmp_path):
    _, _, code = (b.text for b in documents.blocks(documents.text_of(DOCS / "agents.md")) if b.language == "python")
    port = free_port()
    assert code.count(":8000") == 1
    (tmp_path / "driver.py").write_text(code.replace(":8000", f":{port}"))
    waits = f"import socket, time, runpy\nwhile socket.socket().connect_ex(('127.0.0.1', {port})): time.sleep(0.05)\n"
    command = [sys.executable, "-c", f"{waits}runpy.run_path({str(tmp_path / 'driver.py')!r})"]
    driver = subprocess.Popen(command, env=environment())
    try:
        flags = f"--agent-sessions --port {port} --max-turns 2 --max-tokens-per-microbatch 500 --train-iters 1"
        few = "--prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 4 --max-response-length 20"
        train("rl", rl_argv(tmp_path / "run", f"{flags} {few}"))
        assert driver.wait(SAFETY_SECONDS) == 0
    finally:
        driver.kill()
        driver.wait()
    row = metrics(tmp_path / "run")[1]
    assert row["environment/failures"] == 0 and row["environment/turns_mean"] == 1


# Of packages that a page is about, which it does not install.
ABOUT = {"rewards.md": {"trl"}, "environments.md": {"PIL"}}


def test_examples_import_what_megarl_or_the_page_installs():
    megarl, _, _ = (ROOT / "setup.py").read_text().partition('"test": [')
    installed = {*sys.stdlib_module_names, "megarl", *re.findall(r'"([a-z]+)(?:\[\w+\])?>', megarl)}
    imported = set()
    for page in documents.pages():
        text = documents.text_of(page)
        named = re.findall(r"[a-z]+", " ".join(re.findall("pip install (.*?) *#", text))) + [*ABOUT.get(page.name, ())]
        for block in documents.blocks(text):
            if block.language == "python":
                imports = re.findall(r"^\s*(?:from|import) (\w+)", block.text, re.MULTILINE)
                imported |= {*imports}
                assert {*imports} <= {*installed, *named}, f"{page.name}:{block.line}"
    assert {"openai", "torch", "json"} <= imported and "httpx" not in installed
