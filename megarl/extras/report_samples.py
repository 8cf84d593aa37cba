"""The samples of a report: responses of a few steps, some of them token by token.

Every text comes from a model or a data file. A value of another type than `megarl.observe.samples` says is left out.
"""

import base64
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.data.images.names import names_in
from megarl.errors import UsageError
from megarl.observe.files import step_of
from megarl.observe.samples import QUANTITIES, THUMBNAILS
from megarl.plain_files import is_absent, parse_record, read_bytes, read_records, reading
from megarl.plain_values import is_plain_number

STEPS = 12  # in a report
RESPONSES = 16  # of a step
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 8_000, 16_000  # of a text; the rest is cut
THUMBNAIL_BYTES = 32_000
TOKENS = 30_000  # shown one by one in a whole report: about 3 MB
DIGITS = 7  # significant ones of a token's numbers


def samples(directory: Path, rows: list[dict]) -> dict:
    """`{"steps": [{"step", "notes", "total", "rows"}], "recorded", "images"}`: samples of the first and last
    step, those with the highest and lowest mean reward, and some between. UsageError for a file that is not JSON lines
    of objects.
    """
    files = {step_of(path): path for path in sorted(Path(directory, "samples").glob("step_*.jsonl"))}
    covered = {row["step"]: row.get("reward/mean") for row in rows}
    recorded = [step for step in files if step in covered]
    chosen = choose_steps(recorded, covered)
    budget = TOKENS // max(1, len(chosen))
    found: list[dict[str, Any]] = []
    for step, notes in chosen.items():
        tokens = Path(directory, "tokens", files[step].name)
        of_step = step_rows(_read(files[step]), _read(tokens) if not is_absent(tokens) else [])
        found.append({"step": step, "notes": notes, "total": len(of_step), "rows": _shown(of_step, budget)})
    whole = [row for of_step in found for row in of_step["rows"]]
    shown = [row.get("prompt", "") for row in whole]
    shown += [turn["observation"] for row in whole for turn in row.get("turns", ())]
    return {"steps": found, "recorded": len(recorded), **_images(Path(directory, THUMBNAILS), shown)}


def _images(folder: Path, texts: list[str]) -> dict:
    """`{"images": name -> data: URL}` of the images in texts that the run has written; nothing without one."""
    found = {}
    for name in dict.fromkeys(name for text in texts for name in names_in(text)):
        with contextlib.suppress(OSError):
            data = read_bytes(folder / f"{name}.png", THUMBNAIL_BYTES)
            if data.startswith(b"\x89PNG"):
                found[name] = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"images": found} if found else {}


def choose_steps(steps: Sequence[int], rewards: dict[int, Any]) -> dict[int, list[str]]:
    """At most `STEPS` of these steps (ascending), with the reasons: first, last, best and worst mean reward; others are
    evenly between."""
    if not steps:
        return {}
    marks = {"first": steps[0], "last": steps[-1]}
    known = [step for step in steps if rewards.get(step) is not None]
    if known:
        marks |= {
            "highest reward": max(known, key=rewards.__getitem__),
            "lowest reward": min(known, key=rewards.__getitem__),
        }
    chosen, wanted = set(marks.values()), min(STEPS, len(steps))
    for count in range(wanted, 1, -1):  # fewer between, until all together are few enough
        even = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
        if len(even | chosen) <= wanted:
            chosen |= even
            break
    return {step: [note for note, marked in marks.items() if marked == step] for step in sorted(chosen)}


def step_rows(rows: list[dict], token_rows: list[dict]) -> list[dict]:
    """The rows of samples/ of a step, those with a row in tokens/ first, whose fields they have then.

    A row of tokens/ belongs to the sample with the same prompt and response. With a group filter the numbers of both
    may differ, and a response of an earlier step may have no sample.
    """
    waiting: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        waiting.setdefault(_texts(row), []).append(row)
    merged = []
    for token_row in token_rows:
        same = waiting.get(_texts(token_row), [])
        sample = same.pop(0) if same else {}
        merged.append({**token_row, **sample})
    return merged + [row for same in waiting.values() for row in same]


def _texts(row: dict) -> tuple[str, str]:
    return str(row.get("prompt")), str(row.get("response"))


def _shown(rows: list[dict], budget: int) -> list[dict]:
    with_tokens = [row for row in rows if _has_tokens(row)][:RESPONSES]
    others = [row for row in rows if not _has_tokens(row)]
    room = RESPONSES - len(with_tokens)
    if len(others) > room:  # the best and the worst say most
        others.sort(key=lambda row: -(_number(row.get("reward")) or 0))
        others = others[: room - room // 2] + others[len(others) - room // 2 :]
    share = budget // max(1, len(with_tokens))
    return [whole_row(row) | token_fields(row, share) for row in with_tokens] + [whole_row(row) for row in others]


def whole_row(row: dict) -> dict:
    """What the report shows of a row of samples, without its tokens; texts are cut, values of other types left out."""
    parts = row.get("reward_parts")
    found = {
        "prompt": _text(row.get("prompt"), PROMPT_CHARACTERS),
        "response": _text(row.get("response"), RESPONSE_CHARACTERS),
        "answer": _text(row.get("answer"), PROMPT_CHARACTERS),
        "extracted": _text(row.get("extracted"), PROMPT_CHARACTERS),
        **{name: _number(row.get(name)) for name in ("sequence", "reward", "length")},
        **{name: row[name] for name in ("correct", "finished", "kept") if isinstance(row.get(name), bool)},
        "reward_parts": {k: _number(part) for k, part in parts.items()} if isinstance(parts, dict) else None,
        "turns": _texts_with_numbers(row.get("turns"), ("text", "observation"), "reward"),
        "judgements": _texts_with_numbers(row.get("judgements"), ("text",), "number"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _texts_with_numbers(value: object, texts: Sequence[str], number: str) -> list[dict] | None:
    """The turns of an episode, or what the judge wrote, with rewards or grades; None if it is no such list."""
    if not isinstance(value, list) or not _is_list_of(value, dict):
        return None
    limit = RESPONSE_CHARACTERS // max(1, len(value))
    shown = [{name: _text(each.get(name), limit) or "" for name in texts} for each in value]
    return [{**those, number: _number(each.get(number))} for those, each in zip(shown, value, strict=True)]


def _has_tokens(row: dict) -> bool:
    return _is_list_of(row.get("tokens"), str)


def token_fields(row: dict, count: int) -> dict:
    """The first `count` tokens of a row, with the quantities that the row has for each of them."""
    size, fields = len(row["tokens"]), {}
    for name in ("token_ids", *QUANTITIES):
        if _is_list_of(row.get(name), (int, float, type(None))) and len(row[name]) == size:
            fields[name] = row[name]
    found, observed = {"tokens": row["tokens"][:count]}, [False] * size
    if _is_list_of(row.get("observed"), bool) and len(row["observed"]) == size:
        observed = row["observed"]
        found["observed"] = observed[:count]
    of_policy = zip(fields.get("advantages", ()), observed, strict=False)
    advantages = [value for value, is_observed in of_policy if value is not None and not is_observed]
    found |= {name: [_rounded(value) for value in values[:count]] for name, values in fields.items()}
    return found | {"advantage": _rounded(sum(advantages) / len(advantages)) if advantages else None}


def _is_list_of(value: object, kinds) -> bool:
    return isinstance(value, list) and all(isinstance(item, kinds) for item in value)


def _number(value: Any) -> float | None:
    return value if is_plain_number(value) else None


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: object, limit: int) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _read(path: Path) -> list[dict]:
    with reading(str(path)):
        lines = read_records(path)
    records = []
    for number, line in enumerate(lines, 1):
        record = parse_record(line) if line else {}
        if record is None:
            raise UsageError(f"{path} line {number} is not a JSON object: {line[:60]!r}")
        records += [record] if line else []
    return records
