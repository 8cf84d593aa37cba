"""The judge: its random numbers, retries, means, failures, other tokenizers; layouts and resumes are in tests/laws."""

import functools
import tempfile
from pathlib import Path
from statistics import fmean

import pytest

from tests.helpers.envs.judges import LENGTH, judge_flags, write
from tests.helpers.folders import hf_folders
from tests.helpers.programs import inputs, metrics, program, rl_argv, rows_of, train
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world


@functools.cache
def judges() -> Path:
    """Folder of judge files."""
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=inputs()))
    write(folder / "sampled.yaml")
    write(folder / "nonsense.yaml", number={"json": "grade"}, range=[1, 2])
    for mode, places in (("group", "{responses}="), ("pair", "{first}{second}=")):
        number = {"regex": "[0-9]"} if mode == "group" else {"last-number": True}
        write(folder / f"{mode}.yaml", mode=mode, messages=[{"role": "user", "content": places}], number=number)
    return folder


def flags_of(flags: str = "", config: str = "sampled", **more) -> str:
    return judge_flags(judges() / f"{config}.yaml", flags, **more)


@functools.cache
def alone() -> Path:
    """Run folder of one rank that has all roles."""
    save = judges() / "alone"
    train("rl", rl_argv(save, flags_of()))
    return save


def test_judgements_are_those_of_the_documented_streams():
    """Each once more alone, without cached prefixes, with the key of (seed, step, line, sequence, sample, try)."""
    parsed = program("rl", rl_argv(Path("x"), flags_of()), 1)
    found, expected = run_world(one_by_one, 1, parsed, rows_of(alone()))[0], rows_of(alone())
    assert found == [[judgement["text"] for judgement in row["judgements"]] for row in expected]


def one_by_one(rank: int, parsed, sampled: list[dict]) -> list[list[str]]:
    import torch

    from megarl.algorithms.token_sampling import SamplingSettings, stream_keys
    from megarl.checkpoint import pretrained
    from megarl.comm import role_mesh
    from megarl.data.prompts import load_prompts
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from megarl.mcore.model import gpt
    from megarl.roles.judge_requests import STREAMS
    from megarl.trainers.reward_factory import RewardFactory

    factory, prompts = RewardFactory(parsed), load_prompts(str(inputs() / "train.jsonl"))
    factory.check(prompts)
    tokenizer, role = factory.encoder.tokenizer, parsed.roles["reward"]
    groups = role_mesh.create_mesh(parsed.roles, SAFETY)["reward"].pg_collection
    model = gpt.build_frozen_model(role.megatron, tokenizer.vocab_size, groups)
    pretrained.load_weights(inputs() / "sft" / "checkpoints" / "step_00000040", model, groups)
    engine = RolloutEngine(model[0], groups, tokenizer.vocab_size, LENGTH, 0.001, 4)
    lines = {prompt.text: prompt for prompt in prompts}
    texts = []
    for row in sampled:
        prompt, text = lines[row["prompt"]], []
        for sample, attempt in tried(row["judgements"], factory.judge.samples):
            stream = torch.tensor([row["sequence"] << 20 | sample << 10 | attempt])
            key = int(stream_keys(parsed.settings.seed + STREAMS, 1, torch.tensor([prompt.index]), stream))
            request = GenerationRequest(factory.judge_prompts.tokens(prompt, [row["response"]]), key, 4)
            (done,) = engine.generate([request], tokenizer.end_ids, SamplingSettings())
            text.append(factory.judge_prompts.text(done.tokens))
        texts.append(text)
    return texts


def tried(judgements: list[dict], count: int) -> list[tuple[int, int]]:
    """(sample, try) of each judgement of a response: all samples, then again those without a number, and so on."""
    found, waiting, attempt = [], list(range(count)), 0
    while len(found) < len(judgements):
        now = judgements[len(found) : len(found) + len(waiting)]
        found += [(sample, attempt) for sample in waiting]
        waiting = [s for s, judgement in zip(waiting, now, strict=True) if judgement["number"] is None]
        attempt += 1
    return found


def test_the_mean_number_is_the_reward():
    judged, every = rows_of(alone()), [each for row in rows_of(alone()) for each in row["judgements"]]
    assert {len(row["judgements"]) for row in judged} > {2}  # some were tried again
    for row in judged:
        numbers = [each["number"] for each in row["judgements"] if each["number"] is not None]
        assert row["reward"] == row["reward_values"]["judge"] == fmean(numbers) and 1 <= len(numbers) <= 2
        assert row["reward_parts"] == {"judge": row["reward"]}
    found = metrics(alone())[1]
    assert found["judge/readable_fraction"] == fmean(each["number"] is not None for each in every)
    assert found["reward/judge/mean"] == pytest.approx(fmean(row["reward"] for row in judged))
    assert (
        found["judge/length_mean"] * len(every) == pytest.approx(found["judge/tokens"]) and found["judge/tokens"] > 24
    )
    assert 0 < found["judge/reused_tokens"] and found["time/reward/judge_s"] > 0


def test_a_judge_that_gives_no_number_stops_the_run_by_name(tmp_path):
    with pytest.raises(Exception, match="reward judge failed on 12 of 12 samples; .* no number from 1 to 2 in the"):
        train("rl", rl_argv(tmp_path / "run", flags_of(config="nonsense")), 2)


@pytest.mark.parametrize("failure, reward", [("drop", None), long(("fallback", -3.0))])
def test_responses_without_a_number_are_dropped_or_get_the_fallback(failure, reward, tmp_path):
    flags = f"--reward-max-failures 1 --reward-failure {failure} --reward-fallback -3"
    train("rl", rl_argv(tmp_path / "run", flags_of(flags, "nonsense")))
    found, sampled = metrics(tmp_path / "run")[1], rows_of(tmp_path / "run")
    assert found["reward/judge/failures"] == len(sampled) == 12 and found["judge/readable_fraction"] == 0
    assert all(len(row["judgements"]) == 2 * 3 and "no number from 1 to 2" in row["failure"] for row in sampled)
    assert [row["reward"] for row in sampled] == [-3.0] * 12
    assert found.get("reward/judge/mean") == reward


@pytest.mark.long
def test_a_judge_of_a_hugging_face_folder_reads_with_its_own_template(tmp_path):
    folder = hf_folders.write_folder("llama2", tmp_path / "judge")
    write(tmp_path / "judge.yaml", **{"range": [-1e9, 1e9], "max-tokens": 24})
    policy = hf_folders.write_folder("qwen3", tmp_path / "policy")
    argv = (
        f"--hf-model {policy} --judge-hf-model {folder} --judge-config {tmp_path}/judge.yaml --reward judge"
        f" --prompts {inputs()}/train.jsonl --save {tmp_path}/run --train-iters 1 --advantage grpo --prompts-per-step 4"
        " --max-prompt-length 48 --max-response-length 8 --judge-max-length 256 --judge-buffer-gb 0.01"
        " --rollout-buffer-gb 0.01 --reward-max-failures 1"
    ).split()
    parsed = program("rl", argv, 1)
    assert parsed.roles["reward"].is_judge and parsed.roles["reward"].tokenizer_model == str(folder)
    train("rl", argv)
    written = [each["text"] for row in rows_of(tmp_path / "run") for each in row["judgements"]]
    assert len(set(written)) > 6 and max(map(len, written)) > 4


def test_a_cache_that_holds_no_judgement_is_refused(tmp_path):
    with pytest.raises(
        Exception, match="--judge-buffer-gb 1e-05: the KV cache holds 16 tokens; --judge-max-length is 64"
    ):
        train("rl", rl_argv(tmp_path / "run", flags_of("--judge-buffer-gb 0.00001")))


# -- responses that are judged together --------------------------------------------------------------------------


COMPARED = "--samples-per-prompt 3 --minibatch-size 6 --judge-max-length 160 --reward-max-failures 1"


@functools.cache
def compared(mode: str) -> Path:
    """Run folder of one rank with a judge of pairs or groups."""
    save = judges() / f"alone-{mode}"
    train("rl", rl_argv(save, flags_of(COMPARED, mode, reward="judge")))
    return save


@pytest.mark.parametrize("mode", ["pair", "group"])
def test_rewards_of_responses_judged_together(mode):
    judged, found = rows_of(compared(mode)), metrics(compared(mode))[1]
    assert any("failure" not in row for row in judged) and len(judged) == 18
    for row in judged:
        own, group = row["sequence"], range(row["sequence"] // 3 * 3, row["sequence"] // 3 * 3 + 3)
        numbers = [each["number"] for each in row["judgements"] if each["number"] is not None]
        assert ("failure" in row) == (not numbers) and (not numbers or row["reward"] == fmean(numbers))
        orders = {tuple(each["responses"]) for each in row["judgements"]}
        if mode == "pair":
            assert orders == {order for i in group if i != own for order in ((own, i), (i, own))}
        else:
            assert orders == {tuple(group), (*group[1:], group[0])}
        assert all(own in each["responses"] for each in row["judgements"])
    if mode == "pair":
        both = [each for row in judged for each in row["judgements"] if each["number"] is not None]
        assert all(0 <= each["number"] <= 1 for each in both) and 0 <= found["judge/order_agreement"] <= 1
    else:
        assert "judge/order_agreement" not in found


def test_a_pair_shares_one_win():
    by_text: dict = {}
    for row in rows_of(compared("pair")):
        for each in row["judgements"]:
            if each["number"] is not None:
                by_text.setdefault((tuple(each["responses"]), each["text"]), []).append(each["number"])
    assert len(by_text) > 9
    for numbers in by_text.values():  # a row of each of the two responses has it
        assert len(numbers) % 2 == 0 and sum(numbers) == pytest.approx(len(numbers) / 2)
