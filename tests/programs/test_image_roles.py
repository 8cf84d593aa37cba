"""Roles beside the policy that read pictures with a template, a processor and a tower of their own, as transformers."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers import programs
from tests.helpers.folders import vision_folders
from tests.helpers.folders.vision_programs import argv, counted, folder, inputs_of, refused, transformers_model
from tests.helpers.programs import metrics, program
from tests.helpers.worlds import run_world

JUDGE = {"messages": [{"role": "user", "content": "{question} {answer} {response} is"}], "temperature": 0,
         "number": {"last-number": True}, "range": [0, 99], "max-tokens": 4}  # fmt: skip
OF_JUDGE = "--judge-max-length 200 --judge-buffer-gb 0.01 --reward-failure fallback --reward-max-failures 1"


@functools.cache
def other() -> Path:
    """A folder with the policy's weights, another processor and another tower."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(folder() / "model", vision_folders.temporary() / "model")
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings |= {"image_mean": [0.1, 0.2, 0.3], "size": {"longest_edge": 8192, "shortest_edge": 1024}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    tensors = load_file(path / "model.safetensors")
    tensors["model.visual.merger.norm.bias"] += 0.5
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@functools.cache
def reward_model() -> Path:
    """A reward model with the folder's weights as they are, and a scalar head of tiny numbers."""
    save, model = vision_folders.temporary() / "reward", other()
    flags = (f"--hf-model {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --prompts"
             f" {folder() / 'pairs.jsonl'} --max-prompt-length 80 --max-response-length 6 --global-batch-size 12"
             f" --max-tokens-per-microbatch 200 --lr 1e-12 --train-iters 1 --save {save}")  # fmt: skip
    programs.train("reward", flags.split())
    return save


def judged(rank: int, parsed) -> list[tuple]:
    """(what the judge wrote, what transformers writes, and what it writes of the pictures upside down) of each request
    of a run."""
    from megarl.roles.judge_requests import JudgeRequests

    answers, request = [], JudgeRequests._request

    def keep(requests, answer, attempt):
        answers.append((answer, requests.prompts))
        return request(requests, answer, attempt)

    JudgeRequests._request = keep
    programs.in_world(rank, "rl", parsed)
    model = transformers_model(other())

    def written(answer, prompts, swap):
        given = inputs_of(other(), answer.tokens, prompts.encoder, swap)
        model.model.rope_deltas = None  # else that of the last prompt
        ids = model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=2)
        return prompts.text(ids[0, given["input_ids"].shape[1] :].tolist())

    return [(a.judgements[0][0], written(a, prompts, False), written(a, prompts, True)) for a, prompts in answers]


def scored(rank: int, parsed) -> list[tuple]:
    """The same of a reward model and its scores."""
    from megarl.roles.reward_model import RewardModel

    found, read, scores = [], RewardModel._read, RewardModel.scores

    def keep(model, texts):
        batch = read(model, texts)
        found.append((model, [each.tolist() for each in batch.tokens.split(batch.lengths.tolist())]))
        return batch

    def keep_scores(model, texts):
        values = scores(model, texts)
        found.append(values[0].tolist())
        return values

    RewardModel._read, RewardModel.scores = keep, keep_scores
    programs.in_world(rank, "rl", parsed)
    (model, streams), values = found
    head, language = model.members[0].model[0].output_layer.weight.detach(), transformers_model(other()).model

    def score(ids, swap):
        language.rope_deltas = None
        last = language(**inputs_of(other(), ids, model.encoder, swap), use_cache=False).last_hidden_state[0, -1]
        return float(last @ head.flatten())

    with torch.no_grad():
        rows = [(value, score(ids, False), score(ids, True)) for value, ids in zip(values, streams, strict=True)]
    return [tuple(value / float(head.norm()) for value in row) for row in rows]


def test_a_reward_model_scores_pictures_as_transformers(tmp_path):
    flags = f"--reward model --reward-hf-model {other()} --reward-model {reward_model()}"
    (found,) = run_world(scored, 1, program("rl", argv(tmp_path / "run", flags), 1))
    values, expected, swapped = (torch.tensor(column) for column in zip(*found, strict=True))
    assert len(found) == 8 and (expected - swapped).abs().min() > 1e-3
    assert values.tolist() == pytest.approx(expected.tolist(), abs=2e-5)


def test_a_reward_model_with_the_policys_tower_is_sent_the_pictures(tmp_path):
    flags = f"--reward model --reward-hf-model {folder() / 'model'} --reward-model {reward_model()}"
    run_world(counted, 1, program("rl", argv(tmp_path / "one", flags), 1))
    apart = f"{flags} --role-map actor=0;reference=0;reward=1;rollout=0"
    computed, sent = run_world(counted, 2, program("rl", argv(tmp_path / "two", apart), 2))
    assert sent == [] and len(computed) == len(set(computed)) > 0
    one, two = (metrics(tmp_path / name)[1]["reward/mean"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5) and abs(one) > 1e-12


def test_a_judge_writes_of_pictures_as_transformers(tmp_path):
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(JUDGE))
    flags = f"--reward judge --judge-config {tmp_path / 'judge.yaml'} --judge-hf-model {other()} {OF_JUDGE}"
    (found,) = run_world(judged, 1, program("rl", argv(tmp_path / "run", flags), 1))
    values, expected, swapped = zip(*found, strict=True)
    assert len(found) == 8 and expected != swapped
    assert values == expected


def test_a_role_without_a_tower_is_refused(tmp_path):
    model = shutil.copytree(other(), tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    flags = f"--reward model --reward-hf-model {model} --reward-model {reward_model()}"
    assert f"pictures.jsonl: has images; --reward-hf-model {model} has no image processor" in refused(
        argv(tmp_path / "run", flags)
    )
