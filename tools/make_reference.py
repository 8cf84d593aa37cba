"""Writes what is generated: docs/flags.md, docs/metrics.md, and the table of Megatron's options.

    python tools/make_reference.py            # writes both pages
    python tools/make_reference.py --check    # exit status 1 if a page is not what this program would write

The flags come from the parsers of megarl and Megatron, the metrics from `tools/_metric_catalog.py`. Run it
after a flag or a metric has changed; a test compares the pages.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl.flags import parser  # noqa: E402  the checkout's own code
from megarl.flags.algorithm import of_estimator  # noqa: E402
from megarl.flags.conditions import EVALUATION, SERVES  # noqa: E402
from megarl.flags.serving import LISTENS  # noqa: E402
from megarl.flags.settings import Settings  # noqa: E402
from tools import _metric_catalog as metric_catalog  # noqa: E402

DOCS = ROOT / "docs"
MADE = "<!-- Made by tools/make_reference.py; do not edit. -->"
KINDS: dict[object, str] = {int: "integer", float: "number", bool: "true, false", str: "text"}
TRAINING = ("rl", "sft", "reward", "preference")
SHORTER = ((": above ", " > "), (": 0 or more", " ≥ 0"), (", at most ", ", ≤ "))
IN_TRAINING = {
    EVALUATION: "--eval-prompts",
    SERVES: "--serve-policy",
    LISTENS: "--serve-policy` or `--agent-sessions",
}  # condition -> flag that training needs
TITLES = {
    "options": "Megatron: other flags",
    "moe": "Megatron: mixture of experts",
    "mla": "Megatron: latent attention",
    "megarl's layers": "Layers that Megatron's parser lacks",
    "parameters by name": "Parameters by name",
}
LONGEST = 60  # letters of Megatron's help texts

FLAGS_HEAD = f"""{MADE}

# Flags

Every flag of every program: first megarl's own, then those of Megatron that it accepts. A key of a `--config` file is a
flag without its dashes. `--help` of a program prints its own flags.

* **Programs**: rl, sft, reward and preference are `train_rl`, `train_sft`, `train_reward` and `train_preference`;
  training is all four. `python -m megarl.plan` takes the flags of `train_rl`, and `--world-size`, `--ranks-per-node`,
  `--vocab-size` and `--json`.
* **Roles**: where a flag may differ per role, the prefix names the role: `--critic-offload`. Every Megatron flag may
  have the prefix of any role (`--critic-lr`); that of the rollout is allowed for its parallel sizes.
* **Without effect**: in such a run the flag is dropped with a warning.
* Besides these, every program has `--config FILE …`, `--check` (check all input, then exit) and `--help`.

## megarl's flags
"""
MEGATRON_HEAD = """## Megatron's flags

The flags of Megatron's parser that change what megarl does, with its help texts shortened; all others are refused. The
defaults are megarl's where it has its own. **training** marks flags that only roles which learn may have.
"""
METRICS_HEAD = f"""{MADE}

# Metrics

Every name in `metrics.jsonl` and TensorBoard. A line has only the metrics that its step and flags give. A name in angle
brackets stands for several: `time/<role>/<phase>_s` for `time/actor/update_s` and others. Training is all four programs
that train. Where several ranks have a metric, it is the same number on all of them: sums and means are over the whole
step. Values that are not finite are `null` in the file.
"""
PROMETHEUS_HEAD = """## Metrics of the generation server

`GET /metrics` of [the server](serving.md) answers in Prometheus' text format.
"""


def code(text: str) -> str:
    """A text as inline code of a table's cell."""
    return "`" + text.replace("|", "\\|") + "`"


def prose(text: str) -> str:
    """A help text as Markdown of a table's cell: nothing in it is markup but flags and metrics, which become code."""
    text = " ".join(text.replace("`", "").split())
    for letter, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("[", "\\[")):
        text = text.replace(letter, escaped)
    return re.sub(r"(?<![\w`-])(--[a-z][a-z0-9-]*[a-z0-9])", r"`\1`", text)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; no first cell is empty."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(" | ".join(line).rstrip() for line in lines) + "\n"


def value_text(value) -> str:
    """A default as the command line has it; an empty cell for none."""
    if value is None:
        return ""
    return code("true" if value is True else "false" if value is False else str(value))


# -- megarl's flags ----------------------------------------------------------------------------------------------


def titles() -> dict[str, str]:
    """Field of `Settings` -> title of its section: the comment line above it in its class, or what its class is for."""
    found = {}
    for topic in Settings.__bases__:
        lines, title = inspect.getsource(topic).split("\n"), (inspect.getdoc(topic) or "").split("\n")[0].rstrip(".")
        for line in lines:
            comment, field = re.fullmatch(r"    # (.+)", line), re.match(r"    (\w+): ", line)
            title = re.split(r"[.;]", comment[1])[0] if comment else title
            if field and field[1] in vars(topic)["__annotations__"]:
                found[field[1]] = title
    return found


def without_effect(flag: parser.Flag) -> str:
    """In which runs the flag does nothing, in words; "" for one that always has an effect."""
    from megarl.algorithms import ESTIMATORS
    from megarl.algorithms.policy_losses import POLICY_LOSSES

    condition = flag.condition
    if condition is None:
        return ""
    if flag.setting is None and flag.name == flag.common:
        names = [name for name, loss in POLICY_LOSSES.items() if flag.name in loss.flags()]
        return f"`--policy-loss` other than {', '.join(names)}"
    options = {option for estimator in ESTIMATORS.values() for option in estimator.options}
    for option in (option for option in options if of_estimator(option) is condition):
        names = [name for name, estimator in ESTIMATORS.items() if option in estimator.options]
        return f"`--advantage` other than {', '.join(names)}"
    if condition in IN_TRAINING:  # always with an effect in the programs evaluate or serve
        return f"in training without `{IN_TRAINING[condition]}`"
    reason = re.sub(r" \{\w+\}", "", condition.reason)
    return prose(re.sub("^needs ", "without ", reason).replace("without several", "one folder instead of several"))


def kind_text(flag: parser.Flag) -> str:
    """Type and allowed values."""
    kind = KINDS[flag.kind]
    allowed = flag.allowed
    if not allowed:
        return kind
    if allowed.startswith("one of") or kind == "text":
        return prose(allowed)
    text = f"{kind}: {allowed.removeprefix('a number ').removeprefix('a finite number').strip()}".rstrip(": ")
    for long, short in SHORTER:
        text = text.replace(long, short)
    return prose(text)


def own_flags() -> dict[str, dict[str, parser.Flag]]:
    """Flag -> program -> the flag there, those with a role prefix left out."""
    found: dict[str, dict[str, parser.Flag]] = {}
    for program in parser.MODULES:
        for name, flag in parser.own_flags(program).items():
            if name == flag.common:
                found.setdefault(name, {})[program] = flag
    return found


def own_row(name: str, by_program: dict[str, parser.Flag], roles: tuple[str, ...]) -> list[str]:
    """A line of the table of megarl's flags."""
    flag = next(iter(by_program.values()))
    others = [program for program in by_program if program not in TRAINING]
    trains = ["training"] if by_program.keys() >= {*TRAINING} else [p for p in by_program if p in TRAINING]
    programs = "all" if len(by_program) == len(parser.MODULES) else ", ".join([*trains, *others])
    text = prose(flag.text.replace("; may differ per role", ""))
    if roles:
        text += f". Per role: {', '.join(roles)}"
    return [code(f"--{name}"), kind_text(flag), value_text(flag.default), programs, text, without_effect(flag)]


def own_sections() -> dict[str, list[list[str]]]:
    """Title -> lines of the table."""
    flags, sections, title_of = own_flags(), {}, titles()
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(Settings)}
    for field_name, title in title_of.items():
        name = field_name.replace("_", "-")
        row = own_row(name, flags.pop(name), fields[name].metadata["roles"])
        sections.setdefault(title, []).append(row)
    sections["Options of policy losses"] = [own_row(name, programs, ()) for name, programs in flags.items()]
    return sections


# -- Megatron's flags --------------------------------------------------------------------------------------------


def megatron_text(action: argparse.Action) -> str:
    """Megatron's help text, its first sentence or so."""
    text = " ".join((action.help or f"switches {action.dest} off").replace("%%", "%").split())
    if len(text) > LONGEST:
        sentence = re.split(r"(?<=[a-z)\]])\. (?=[A-Z])", text)[0]
        text = sentence if len(sentence) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " …"
    return text.rstrip(".")


def megatron_kind(action: argparse.Action) -> str:
    """Type or choices of a flag; switches have no value."""
    if action.choices is not None:
        kind = "one of " + ", ".join(map(str, action.choices))
    elif action.nargs == 0:
        return "switch"
    else:
        kind = KINDS.get(action.type, "number" if getattr(action.type, "__name__", "") == "number" else "text")
    return prose(f"list: {kind}" if action.nargs in ("+", "*") else kind)


def megatron_default(action: argparse.Action, defaults) -> str:
    """The value without the flag; of a switch, whether its attribute is what the switch would set."""
    value = getattr(defaults, action.dest, None)
    if action.nargs == 0:
        return "on" if value == action.const else "off"
    return value_text(getattr(value, "name", value))


def megatron_sections() -> tuple[dict[str, list[list[str]]], list[list[str]]]:
    """(title -> lines of the table, lines of the table of flags with one allowed value)."""
    from megarl.mcore.config import megatron_flags, supported_flags

    defaults, sections, refused = megatron_flags.parse_tokens("actor", []), {}, []
    wanted = supported_flags.used() | {"global_batch_size"}
    for group in megatron_flags._parser()._action_groups:
        for action in group._group_actions:
            if action.dest not in wanted:
                continue
            name = ", ".join(map(code, action.option_strings))
            allowed, reason = supported_flags.ONLY.get(action.dest, ((), ""))
            choices = allowed if isinstance(allowed, tuple) else (allowed,)
            if len(choices) == 1:
                refused.append([name, value_text(choices[0]) or "none", prose(reason)])
                continue
            choices = {"attention_backend": ("auto", *supported_flags.ATTENTION_BACKENDS)}.get(action.dest, choices)
            kind = "one of " + ", ".join(map(str, choices)) if choices else megatron_kind(action)
            marks = "**training**: " if action.dest in supported_flags.training() else ""
            if action.dest == "global_batch_size":
                marks = "**train_sft, train_reward, train_preference**: "
            title = TITLES.get(group.title, f"Megatron: {group.title}")
            sections.setdefault(title, []).append(
                [name, kind, megatron_default(action, defaults), marks + prose(megatron_text(action))]
            )
    return sections, refused


# -- pages -------------------------------------------------------------------------------------------------------


def flags_page() -> str:
    """docs/flags.md."""
    columns = ["flag", "value", "default", "programs", "meaning", "without effect"]
    parts = [FLAGS_HEAD]
    for title, rows in own_sections().items():
        parts.append(f"### {title}\n\n{table(columns, rows)}")
    sections, refused = megatron_sections()
    parts.append(MEGATRON_HEAD)
    for title, rows in sections.items():
        parts.append(f"### {title}\n\n{table(['flag', 'value', 'default', 'meaning'], rows)}")
    parts.append(
        "### Megatron: flags with one allowed value\n\n" + table(["flag", "allowed", "reason"], sorted(refused))
    )
    return "\n".join(parts)


def prometheus_rows() -> list[list[str]]:
    """Lines of the table of the server's metrics, read from its source: its library need not be installed."""
    tree = ast.parse((ROOT / "megarl" / "serving" / "middleware.py").read_text(encoding="utf-8"))
    rows = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        kind = getattr(call.func, "id", "")
        if kind in ("Counter", "Gauge", "Histogram"):
            name, text, *labels = (ast.literal_eval(argument) for argument in call.args)
            name += "_total" * (kind == "Counter")
            rows.append([code(name), kind.lower(), prose(text), ", ".join(labels[0] if labels else [])])
    return sorted(rows)


def programs_text(metric) -> str:
    """The programs that have a metric."""
    trains = {f"train_{name}" for name in TRAINING}
    return "training" if trains == {*metric.programs} else ", ".join(metric.programs)


def metrics_page() -> str:
    """docs/metrics.md."""
    parts, columns = [METRICS_HEAD], ["metric", "unit", "meaning", "present", "programs"]
    for title, metrics in metric_catalog.SECTIONS.items():
        rows = [[code(m.name), m.unit, prose(m.meaning), prose(m.when) or "always", programs_text(m)] for m in metrics]
        parts.append(f"## {title}\n\n{table(columns, rows)}")
    parts.append(PROMETHEUS_HEAD)
    parts.append(table(["metric", "kind", "meaning", "labels"], prometheus_rows()))
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """File -> its content, the table among them."""
    return {
        DOCS / "flags.md": flags_page(),
        DOCS / "metrics.md": metrics_page(),
        parser.TABLE: parser.options_table(),
    }


def main(argv: list[str]) -> int:
    """Writes or compares the pages; the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    arguments.add_argument("--check", action="store_true", help="compare the pages instead of writing them")
    check = arguments.parse_args(argv).check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(
                f"make_reference: {path.relative_to(ROOT)} is stale; run python tools/make_reference.py",
                file=sys.stderr,
            )
        else:
            path.write_text(pages()[path], encoding="utf-8")
            print(f"make_reference: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
