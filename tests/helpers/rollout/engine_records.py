"""What a run's engine was asked and has written, and the turns that are trained on, to compare both."""

import json
from pathlib import Path

from megarl.rollout import response_log
from tests.helpers.programs import in_world

FIELDS = ("tokens", "rollout_logprobs", "response_mask", "turn_rewards", "row_starts")


def recorded(rank: int, parsed, file: Path):
    """Runs train_rl in a world; writes (number, prompt, tokens, log-probs) of its engine's requests, as they end."""
    from megarl.mcore.inference.generation_session import GenerationSession

    add, complete, asked, seen = GenerationSession.add, GenerationSession._completion, {}, []

    def watched_add(self, number, request):
        asked[number] = list(request.prompt)
        add(self, number, request)

    def watched_completion(self, record):
        found = complete(self, record)
        seen.append((found[0], asked.pop(found[0]), found[1].tokens, found[1].logprobs))
        return found

    GenerationSession.add, GenerationSession._completion = watched_add, watched_completion
    in_world(rank, "rl", parsed)
    file.write_text(json.dumps(seen))


def asked_and_written(file: Path) -> list[list]:
    """[prompt, tokens] of each request that `recorded` has written, sorted."""
    return sorted([prompt, tokens] for _, prompt, tokens, _ in json.loads(file.read_text()))


def saved_fields(run: Path, step: int = 1, kind: str = "responses") -> list[dict]:
    """The fields of each record of a step's rollout."""
    paths = sorted((run / f"rollouts/step_{step:08d}").glob("*.log"))
    entries = [entry for path in paths for entry in response_log.whole(path, path.name)]
    return [entry.read().fields for entry in entries if entry.facts["kind"] == kind]


def generated(run: Path, step: int = 1) -> dict[int, list[list]]:
    """Sequence id -> `FIELDS` of a step's rollout of one round, as `--save-rollouts` keeps it; the last two only of
    episodes."""
    rows = generated_rows(run, step)
    assert len(rows) == len(dict(rows)), "several rounds: their sequences have the same ids"
    return dict(rows)


def generated_rows(run: Path, step: int = 1) -> list[tuple[int, list[list]]]:
    """(sequence id in its round, `FIELDS`) of all rounds of a step, in ascending order."""
    rows = []
    for batch in saved_fields(run, step):
        columns = [batch[name].split(batch["lengths"].tolist()) for name in FIELDS if name in batch]
        rows += [
            (number, [column.tolist() for column in of_sequence])
            for number, *of_sequence in zip(batch["sequence_ids"].tolist(), *columns, strict=True)
        ]
    return sorted(rows)


def turns_in_rows(tokens, logprobs, mask, _, starts) -> list[tuple[list, list]]:
    """(tokens of the row before it, its own) of each turn of a sequence that is trained on."""
    found = []
    for begin, end in turn_spans(mask):
        row = max(i for i in range(begin + 1) if i == 0 or starts[i])
        found.append((tokens[row:begin], tokens[begin:end]))
    return found


def turn_spans(mask: list[bool]) -> list[tuple[int, int]]:
    """(start, end) of each run of True."""
    begins = [i for i, (here, before) in enumerate(zip(mask, [False, *mask], strict=False)) if here and not before]
    return [(begin, next((i for i in range(begin, len(mask)) if not mask[i]), len(mask))) for begin in begins]
