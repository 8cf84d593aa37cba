"""Whether a token's log-prob is that of the policy version that generated it."""

import torch


def rows_of(batch) -> list[dict]:
    """Each sequence of a batch in plain numbers."""
    names = ("tokens", "response_mask", "rollout_logprobs", "versions")
    columns = [getattr(batch, name).split(batch.lengths.tolist()) for name in names]
    rows = zip(batch.sequence_ids.tolist(), batch.prompt_ids.tolist(), batch.finished.tolist(), *columns, strict=True)
    return [
        {
            "id": i, "line": line, "finished": finished, "tokens": tokens.tolist(), "mask": mask.tolist(),
            "response": tokens[mask].tolist(), "logprobs": logprobs[mask].tolist(), "versions": versions[mask].tolist(),
        }
        for i, line, finished, tokens, mask, logprobs, versions in rows
    ]  # fmt: skip


def gaps_of(run, version: int, rows: list[dict]) -> list[float]:
    """Differences of the log-probs of a version's tokens from those of the training forward."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, lengths = run.actor.trainable_model.model[0], torch.tensor([len(row["tokens"]) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row["tokens"]])
    with inference_mode(model):
        scores = token_scores(model, tokens, lengths, 1.0, run.tokenizer.vocab_size).logprobs
    gaps = []
    for row, found in zip(rows, scores.split(lengths.tolist()), strict=True):
        mine = torch.tensor(row["versions"]) == version
        gaps += (found[torch.tensor(row["mask"])] - torch.tensor(row["logprobs"])).abs()[mine].tolist()
    return gaps


def largest_gaps(rank: int, parsed, weights: list[dict], rows: list[dict]) -> dict[str, list[float]]:
    """The largest gap of each version's tokens under its own weights and, at most, under its neighbours'.

    `weights`: of versions 1, 2, …; those of version 0 are the run's.
    """
    from megarl.observe.timers import Timers
    from megarl.trainers.rl_trainer import RLTrainer

    run = RLTrainer(parsed, Timers())
    model = run.actor.trainable_model.model[0]
    first = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
    found = {"own": [], "other": []}
    versions = sorted({version for row in rows for version in row["versions"]})
    for held, state in enumerate([first, *weights]):
        model.load_state_dict(state, strict=False)
        for version in versions:
            if abs(held - version) <= 1:
                found["own" if held == version else "other"].append(max(gaps_of(run, version, rows)))
    return found
