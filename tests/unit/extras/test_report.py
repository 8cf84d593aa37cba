"""The page of a report: what it embeds, hostile texts, another run; its tool: wrong input; the page in a browser."""

import base64
import hashlib
import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.extras import report
from megarl.extras.report import command_line, embedded_json, page_of, report_data, settings_table, write_report
from megarl.observe.samples import write_samples
from megarl.observe.settings_file import write_settings
from tests.helpers.waiting import SAFETY_SECONDS
from tools.report import main

FULL = {
    "reward/mean": 0.5, "reward/std": 0.2, "eval/accuracy": 0.4, "kl/reference": 0.01, "kl/coefficient": 0.05,
    "rollout/response_length_mean": 4.0, "actor/loss": -0.01, "critic/loss": 0.2, "rollout/logprob_gap_max": 1e-6,
    "time/step_s": 2.0, "time/actor/update_s": 1.5, "time/actor/idle_fraction": 0.25, "time/idle_fraction": 0.25,
}  # fmt: skip
HOSTILE = [
    "</script><script>alert(1)</script>", '<img src=x onerror="alert(1)">', "<!--", "]]>",
    "\" onmouseover=alert(1) x='", "`${alert(1)}`", "\u202eright to left", "null \0 bell \x07", "half \udc80 of a pair",
    "&lt;b&gt;&#60;", "{{script}}", "\u2028\u2029", "</textarea><svg onload=alert(1)>", "javascript:alert(1)",
    "{{data}}", "\\u003c", "line\nend\r\ttab",
]  # fmt: skip


def make_run(folder: Path, text: str = "text", steps: int = 3) -> Path:
    """The folder of a run with everything that a report shows; `text` is in every place that takes one."""
    folder.mkdir(parents=True)
    every = range(1, steps + 1)
    rows = [{"step": step, **FULL, "reward/mean": step / 10, f"reward/{text}/mean": 1.0} for step in every]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"megarl": {"train_iters": steps, "prompts": text}, "world_size": 1, "environment": {"device": text},
                "roles": {"actor": {"ranks": "0-0", "megatron": {"lr": 1e-3, "name": text}}},
                "command_line": ["megarl.train_rl", "--prompts", text],
                "user_settings": {"megarl": ["prompts"]}}  # fmt: skip
    write_settings(folder, settings)
    sample = {"sequence": 0, "prompt": text, "response": text, "reward": 0.5, "finished": False, "length": 2}
    more = {"answer": text, "extracted": text, "correct": True, "reward_parts": {text: 0.5}}
    numbers = dict(token_ids=[1, 2], advantages=[0.5, -0.25], logprobs=[-1.0, None], rollout_logprobs=[-1.0, -2.0])
    for step in every:
        write_samples(folder, step, [sample | more, sample | {"tokens": [text, text[:3]], **numbers}])
    (folder / "timeline.json").write_text("{}")
    return folder


class _Page(HTMLParser):
    """Elements and attributes of a page, and the text of its data."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.data, self._is_data = Counter(), Counter(), "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        self._is_data = ("id", "data") in attrs

    def handle_endtag(self, tag):
        self._is_data = False

    def handle_data(self, data):
        self.data += data if self._is_data else ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a harmless run and of one whose texts are all hostile."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "harmless"), make_run(folder / "hostile", "".join(HOSTILE))


def test_texts_of_a_run_make_no_element(runs):
    harmless, hostile = (_Page(page_of(report_data(run))) for run in runs)
    assert hostile.tags == harmless.tags and hostile.attributes == harmless.attributes
    assert harmless.tags["script"] == 2 and not any(name.startswith("on") for name in harmless.attributes)
    data = json.loads(hostile.data)
    assert data == report_data(runs[1])
    text, (row,) = "".join(HOSTILE), data["samples"]["steps"][0]["rows"]
    assert shlex.split(data["command"]) == ["megarl.train_rl", "--prompts", text.replace("\udc80", "\\udc80")]
    assert row["prompt"] == row["response"] == row["answer"] == row["tokens"][0] == text
    assert row["reward_parts"] == {text: 0.5} and f"reward/{text}/mean" in data["run"]["metrics"]
    assert ["megarl", "prompts", text.replace("\udc80", "\\udc80"), None, False, True] in data["settings"]


@pytest.mark.parametrize("text", HOSTILE)
def test_data_can_neither_end_nor_open_an_element(text):
    embedded = embedded_json([text, {text: 1}])
    assert embedded.isascii() and not set("<>&") & set(embedded) and json.loads(embedded) == [text, {text: 1}]


def test_the_name_of_a_folder_stays_text(tmp_path):
    run = make_run(tmp_path / "<b>&amp;</title>" / "<i>&amp;'\"")
    page = page_of(report_data(run))
    assert "<title>Report of &lt;i&gt;&amp;amp;&#x27;&quot;</title>" in page
    assert not _Page(page).tags["i"] and not _Page(page).tags["b"]


def test_the_page_loads_nothing_and_runs_its_own_script_alone(runs):
    page = page_of(report_data(runs[0]))
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("script", "style"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r'(?:src|href)="(?!#)', page)


def test_the_scripts_write_text_as_text():
    """No call that reads a string as markup or as a program, neither in the page's own scripts nor in uPlot."""
    paths = report.PAGE.rglob("*.js")
    scripts = {str(path.relative_to(report.PAGE)): path.read_text(encoding="utf-8") for path in paths}
    assert set(scripts) == set(report.SCRIPTS)
    forbidden = "innerHTML|outerHTML|insertAdjacentHTML|document.write|new Function|</script|<!--"
    forbidden += r"|eval\(|fetch\(|import\("
    for name, script in scripts.items():
        assert not re.search(forbidden, script), name
        assert 'setAttribute("on' not in script and "srcdoc" not in script, name


def test_columns_fit_a_phone():
    """A grid of as many columns as fit has at least one, which is then no wider than the page."""
    style = (report.PAGE / "page.css").read_text(encoding="utf-8")
    columns = re.findall(r"repeat\(auto-\w+, minmax\((.{8})", style)
    assert len(columns) >= 4 and set(columns) == {"min(100%"}
    assert "@media (max-width: 480px)" in style


def test_a_run_of_metrics_alone_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 3.0}\n{"step": 2, "sft/loss": null}\n')
    picture, page = write_report(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Permission is hereby granted" in page.read_text()  # the licence of uPlot
    data = json.loads(_Page(page.read_text()).data)
    assert data["timeline"] is data["command"] is None and data["settings"] == []
    assert data["samples"] == {"steps": [], "recorded": 0}
    assert data["run"]["metrics"]["sft/loss"]["y"] == [3.0, None]
    assert data["facts"][:2] == [["steps", "2", "from step 1"], ["fine-tuning loss", "3", ""]]


def test_two_runs_are_compared(runs, tmp_path):
    other = make_run(tmp_path / "harmless", steps=2)
    data = report_data(runs[0], against=other)
    own, others = data["run"], data["other"]
    assert own["name"] != others["name"] and own["name"].endswith("/harmless") and others["name"].endswith("/harmless")
    assert own["metrics"]["reward/mean"]["y"] == [0.1, 0.2, 0.3] and others["metrics"]["reward/mean"]["y"] == [0.1, 0.2]
    assert [row for row in data["settings"] if row[4]] == [["megarl", "train_iters", "3", "2", True, False]]
    assert report_data(runs[0], against=runs[1])["other"]["name"] == "hostile"


# -- command line ------------------------------------------------------------------------------------------------


def test_command_line(runs, tmp_path, capsys):
    run = shutil.copytree(runs[0], tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.png"), str(run / "report.html")]
    assert main([str(run), "--against", str(runs[1])]) == 0
    compared = run / "report-against-hostile.html"
    assert capsys.readouterr().out.split() == [str(compared)]
    assert json.loads(_Page(compared.read_text()).data)["other"]["last"] == 3
    assert main([str(run), "--steps", "2-9", "--out", str(tmp_path / "part.html")]) == 0
    part = json.loads(_Page((tmp_path / "part.html").read_text()).data)
    assert part["run"]["first"] == 2 and [step["step"] for step in part["samples"]["steps"]] == [2, 3]


@pytest.mark.parametrize("arguments, needle", [
    ("{run}/missing", "RUN {run}/missing: not the folder of a run, it has no metrics.jsonl"),
    ("{run} --against {run}/samples", "--against {run}/samples: not the folder of a run"),
    ("{run} --steps 9", "--steps 9: allowed is FIRST-LAST"),
    ("{run} --steps 3-2", "--steps 3-2: allowed is FIRST-LAST"),
    ("{run} --steps 7-9", "--steps 7-9: {run}/metrics.jsonl has none of them; it has steps 1 to 3"),
    ("{run} --out {run}/no/page.html", "--out {run}/no/page.html: no such folder"),
    ("{run} --against {run}", "--against {run}: allowed is another run than {run}"),
    ("{run} --agains {run}", "unrecognized arguments: --agains"),
    ("", "required: RUN"),
])  # fmt: skip
def test_wrong_use_is_one_line(arguments, needle, runs, capsys):
    assert main(arguments.format(run=runs[0]).split()) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and needle.format(run=runs[0]) in said.err


@pytest.mark.parametrize("name, content", [
    ("metrics.jsonl", ""), ("settings.yaml", "[1, 2"), ("settings.yaml", "- a"),
    ("samples/step_00000001.jsonl", "{}\n[1]\n"),
])  # fmt: skip
def test_a_damaged_file_is_named(name, content, runs, tmp_path, capsys):
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / name).write_text(content)
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"error: {run / name}")


def test_the_tool_makes_a_report(runs, tmp_path):
    tool = Path(__file__).parents[3] / "tools" / "report.py"
    command = [sys.executable, str(tool), str(runs[0]), "--out", str(tmp_path / "a.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'a.html'}\n", done.stderr


# -- in a browser ------------------------------------------------------------------------------------------------

PROBE = """
(async () => {
  const found = {}, wait = () => new Promise((resolve) => setTimeout(resolve, 50));
  const tip = () => [...byId("tip").querySelectorAll("b, tr")].map(
    (row) => [...row.children].map((cell) => cell.textContent).join("\\t") || row.textContent).join("\\n");
  const set = (id, value, event = "input") => { byId(id).value = value; byId(id).dispatchEvent(new Event(event)); };
  const [chart, other] = CHARTS, tokens = document.querySelector(".tokens");
  const mouse = (type, part) => {
    const box = chart.plot.over.getBoundingClientRect(), target = type === "mouseup" ? document : chart.plot.over;
    const place = { clientX: box.left + part * box.width, clientY: box.top + 9, movementX: 9 };
    target.dispatchEvent(new MouseEvent(type, { ...place, bubbles: true }));
  };
  const series = () => chart.plot.series.length, ink = () => chart.plot.axes[0].stroke();
  chart.node.scrollIntoView();
  await wait();
  mouse("mousemove", 1);
  found.read = tip();
  found.others = other.plot.cursor.idx;
  mouse("mousedown", 0.4); mouse("mousemove", 0.9); mouse("mouseup", 0.9);
  await wait();
  found.zoomed = [byId("reset-zoom").hidden, ...[chart, other].map((each) => each.plot.scales.x.min > 1)];
  mouse("dblclick", 0.5);
  await wait();
  found.whole = [byId("reset-zoom").hidden, ...[chart, other].map((each) => each.plot.scales.x.min)];
  set("metric-search", "critic");
  const shown = document.querySelectorAll(".chart:not([hidden]), .constant:not([hidden])");
  found.titles = [...shown].map((node) => node.textContent);
  set("metric-search", "");
  found.series = [series()];
  set("smoothing", "0.9");
  found.series.push(series());
  byId("log-scale").click();
  found.log = chart.plot.scales.y.distr;
  found.ink = [ink()];
  byId("theme").click(); byId("theme").click();
  found.ink.push(ink());
  chart.node.querySelector("button").click();
  found.large = byId("large").open;
  byId("large").close();
  await wait();
  tokens.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  found.token = tip();
  found.control = [...tokens.querySelectorAll(".control")].map((node) => node.textContent);
  found.elements = [...document.querySelectorAll("#samples img, #samples script, #samples b b, textarea")].length;
  set("setting-search", "device");
  found.settings = byId("setting-count").textContent;
  const first = document.querySelector("#setting-table tbody tr");
  found.command = [byId("command").hidden, byId("command-line").textContent, byId("command-ranks").textContent];
  found.first = [first.className, first.querySelector(".name").textContent];
  found.timeline = byId("timeline").textContent;
  document.title = JSON.stringify(found);
})().catch((error) => { document.title = JSON.stringify({ error: String(error) }); });
"""


def title_in_browser(folder: Path, page: str):
    """The JSON that a page writes as its title."""
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --virtual-time-budget=4000"
    flags += f" --window-size=1000,2500 --dump-dom --user-data-dir={folder / 'profile'} file://{folder / page}"
    done = subprocess.run(["chromium", *flags.split()], capture_output=True, text=True, timeout=SAFETY_SECONDS)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr
    return json.loads(html.unescape(title[1]))


WIDTHS = """
setTimeout(() => {
  const { clientWidth, scrollWidth } = document.documentElement, charts = document.querySelectorAll(".chart canvas");
  parent.postMessage(JSON.stringify([innerWidth, clientWidth >= scrollWidth, charts.length > 0]), "*");
}, 500);
"""
PHONE = """<title></title><script>onmessage = (event) => { document.title = event.data; };</script>
<iframe src="page.html" style="border: 0; width: 360px; height: 2000px"></iframe>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_phone_does_not_scroll_sideways(tmp_path, monkeypatch):
    """In a frame: a window may have a larger least width."""
    (tmp_path / "widths.js").write_text(WIDTHS)
    monkeypatch.setattr(report, "SCRIPTS", (*report.SCRIPTS, str(tmp_path / "widths.js")))
    run = make_run(tmp_path / "runs" / "run", "x" * 200)
    (tmp_path / "page.html").write_text(page_of(report_data(run, against=make_run(tmp_path / "runs" / ("y" * 80)))))
    (tmp_path / "phone.html").write_text(PHONE)
    assert title_in_browser(tmp_path, "phone.html") == [360, True, True]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_works_in_a_browser(runs, tmp_path, monkeypatch):
    (tmp_path / "probe.js").write_text(PROBE)
    monkeypatch.setattr(report, "SCRIPTS", (*report.SCRIPTS, str(tmp_path / "probe.js")))
    (tmp_path / "page.html").write_text(page_of(report_data(runs[1])))
    found = title_in_browser(tmp_path, "page.html")
    assert "error" not in found, found
    assert found["read"].split("\n")[0] == "step 3" and found["read"].endswith("reward/mean\t0.3")
    assert found["others"] == 2  # the cursor of the next chart is at the same step
    assert found["zoomed"] == [False, True, True] and found["whole"] == [True, 1, 1]
    assert found["titles"] and all("critic" in text or "Losses" in text for text in found["titles"])
    assert found["series"] == [4, 5] and found["log"] == 3 and found["large"]  # steps, band, line; and the raw line
    assert found["ink"][0] != found["ink"][1]
    assert found["token"].split("token\t")[1].startswith("1 of 2") and "ratio π_old / μ\t1" in found["token"]
    assert {"U+202E", "U+0000", "U+DC80", "U+2028"} <= set(found["control"]) and found["elements"] == 0
    assert found["command"][0] is False and found["command"][1].startswith("megarl.train_rl --prompts '</script>")
    assert found["command"][2] == "on 1 rank" and found["first"] == ["user", "prompts"]
    assert found["settings"].startswith("1 of ") and "timeline.json" in found["timeline"]


def _settings(**more) -> dict:
    rates = {"actor": 1, "critic": 2}
    roles = {name: {"ranks": "0-1", "megatron": {"lr": lr, "bf16": False}} for name, lr in rates.items()}
    return {"megarl": {"seed": 1, "load": None, "tags": ["a"]}, "world_size": 4, "roles": roles} | more


def test_settings_have_a_row_for_each_flag():
    rows = settings_table(_settings(), None)
    assert [row[:3] for row in rows] == [
        ["run", "world_size", "4"],
        ["megarl", "load", "null"], ["megarl", "seed", "1"], ["megarl", "tags", '["a"]'],
        ["roles", "actor · ranks", "0-1"], ["roles", "critic · ranks", "0-1"],
        ["megatron", "bf16", "false"], ["megatron", "lr · actor", "1"], ["megatron", "lr · critic", "2"],
    ]  # fmt: skip
    assert not any(row[4] for row in rows)


def test_settings_of_the_user_come_first():
    said = {"megarl": ["tags", "critic_ranks"], "megatron": ["critic_lr", "bf16"]}
    settings = _settings(user_settings=said, command_line=["megarl.train_rl", "--tags", "a b", "--bf16"])
    rows = settings_table(settings, None)
    plain = settings_table(_settings(), None)
    first = [["megarl", "tags"], ["roles", "critic · ranks"], ["megatron", "bf16"], ["megatron", "lr · critic"]]
    assert [row[:2] for row in rows if row[5]] == [row[:2] for row in rows[:4]] == first
    assert rows[4:] == [row for row in plain if row[:2] not in first] and sorted(rows) != sorted(plain)
    # A flag of one role counts for the row of all roles. Of two runs either may have set it; old files say nothing.
    alike = _settings(user_settings={"megatron": ["actor_bf16"]})
    assert [row[1] for row in settings_table(alike, None) if row[5]] == ["bf16"]
    for pair in ((settings, _settings()), (_settings(), settings)):
        compared = settings_table(*pair)
        assert [row[:2] for row in compared if row[5]] == first and not any(row[4] for row in compared)
    assert not any(row[5] for row in plain)
    for damaged in (3, ["lr"], {"megarl": 3, "megatron": None}):
        assert settings_table(_settings(user_settings=damaged), None) == plain
    assert command_line(settings) == "megarl.train_rl --tags 'a b' --bf16"
    assert [command_line(_settings(**more)) for more in ({}, {"command_line": 3})] == [None, None]


def test_differences_from_another_run():
    other = _settings(megarl={"seed": 2, "load": None, "new": 0}, world_size=4)
    del other["roles"]["critic"]
    changed = {row[1]: row[2:4] for row in settings_table(_settings(), other) if row[4]}
    assert changed == {
        "seed": ["1", "2"], "tags": ['["a"]', None], "new": [None, "0"], "critic · ranks": ["0-1", None],
        "lr · critic": ["2", None],
    }  # fmt: skip
    assert settings_table(_settings(), {})[0] == ["run", "world_size", "4", None, True, False]
