"""Programs whose prompts have pictures: where towers compute, samples, checkpoints with another tower or processor."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.planning import summary
from tests.emulator.programs import needs_emulator
from tests.helpers import programs
from tests.helpers.evaluation import run_evaluate
from tests.helpers.folders import vision_folders
from tests.helpers.folders.vision_programs import (
    TURNS,
    argv,
    counted,
    folder,
    inputs_of,
    refused,
    transformers_model,
)
from tests.helpers.forked_programs import launch
from tests.helpers.models.layouts import SP, TP2
from tests.helpers.pages import documents
from tests.helpers.programs import ROOT, metrics, program, samples, write_lines
from tests.helpers.texts.picture_prompts import write_published
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world
from tools.gpu.programs import texts_of


def measured(rank: int, parsed) -> tuple[list[int], int, int, list[int]]:
    """(keys that this rank's tower computed, the tower's bytes, those of all images it has read, and those of images
    that it sent by step and role) of a run."""
    from megarl.mcore.any_model.tower import Tower
    from megarl.mcore.vision.store import ImageStore
    from megarl.trainers import image_inputs

    towers, read, sent, compute = [], {}, [], Tower.compute
    put, to_bytes = ImageStore.put, image_inputs.images_to_bytes

    def count(tower, pixels):
        towers.append((pixels.key, tower))
        return compute(tower, pixels)

    def keep(store, key, image):
        put(store, key, image)
        read[key] = store[key].bytes

    def send(store, keys, kept=()):
        sent.append(sum(store[key].bytes for key in keys))
        return to_bytes(store, keys, kept)

    Tower.compute, ImageStore.put, image_inputs.images_to_bytes = count, keep, send
    programs.in_world(rank, "rl", parsed)
    weights = sum(each.nbytes for each in towers[0][1]._module.state_dict().values()) if towers else 0
    return [key for key, _ in towers], weights, sum(read.values()), sent


def test_a_picture_is_computed_once_and_sent_once_to_the_ranks_that_train(tmp_path):
    """All as the planner says."""
    roles = "--role-map actor=0;reference=0;reward=1;rollout=1"
    flags = argv(tmp_path / "run", f"{roles} --train-iters 3 --kl-coefficient 0.05")
    (actor, no_tower, had, none), (rollout, tower, held, sent) = run_world(measured, 2, program("rl", flags, 2))
    assert actor == [] and 2 <= len(rollout) == len(set(rollout)) <= 5
    rows = list(metrics(tmp_path / "run").values())
    for row in rows:
        assert row["images/count"] > 0 and row["rollout/logprob_gap_max"] <= 1e-5
    samples = (tmp_path / "run" / "samples" / "step_00000001.jsonl").read_text()
    assert all("[image " in json.loads(line)["prompt"] for line in samples.splitlines())
    plan = summary.make_plan(program("rl", flags, 2), 2, 512, image_tokens=6)
    assert (plan.images["tower"], no_tower) == (tower, 0) and tower > 0
    assert sent[0] == rows[0]["images/tokens"] * plan.images["row"] <= plan.images["step"] == 4 * 6 * plan.images["row"]
    assert sent[1::2] == [0] * 3 and sum(sent) == held == had and none == []  # the reference has the actor's
    moves = {move["destination"]: move["payload"] for move in plan.exchanges if move["fields"] == ["rows of images"]}
    assert moves == {"actor": plan.images["step"], "reference": 0}


@pytest.mark.parametrize("layout", [TP2, long(f"{TP2} {SP}")])
def test_ranks_that_read_the_same_tokens_compute_a_picture_once(layout, tmp_path):
    """On each of two ranks with one replica, in rollout and training."""
    flags = f"{layout} --train-iters 2 --kl-coefficient 0.05"
    found = run_world(counted, 2, program("rl", argv(tmp_path / "run", flags), 2))
    computed = found[0] + found[1]
    assert all(found) and 2 <= len(computed) == len(set(computed)) <= 5  # each by the rank that its key says
    assert [row["rollout/logprob_gap_max"] <= 1e-5 for row in metrics(tmp_path / "run").values()] == [True] * 2


def test_prompts_without_pictures_need_no_tower(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"the picture {i}"}], "answer": str(i)} for i in range(8)]
    write_lines(folder() / "texts.jsonl", rows)
    (keys,) = run_world(counted, 1, program("rl", argv(tmp_path / "run", prompts="texts"), 1))
    assert keys == [] and not [name for name in metrics(tmp_path / "run")[1] if name.startswith("images/")]


@functools.cache
def trained() -> Path:
    save = vision_folders.temporary() / "run"
    programs.train("rl", argv(save))
    return save


def test_a_checkpoint_names_its_tower_and_another_one_is_refused(tmp_path):
    manifest = json.loads((trained() / "checkpoints" / "step_00000001" / "manifest.json").read_text())
    assert len(manifest["images"]["tower"]) == 64 and manifest["images"]["processor"].endswith("Pil")
    model = shutil.copytree(folder() / "model", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.visual.merger.norm.bias"] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    more = f"--load {trained()} --train-iters 2"
    line = refused(argv(tmp_path / "other", more, model))
    assert f"--hf-model {model}: its vision tower is not the one of the checkpoint of --load {trained()}" in line


def test_pixels_of_another_processor_are_named(tmp_path):
    save = shutil.copytree(trained(), tmp_path / "run")
    model = shutil.copytree(folder() / "model", tmp_path / "model")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 65536
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    status, _, errors = launch(tmp_path, argv(save, f"--load {save} --train-iters 2", model))
    assert status == 0, errors
    warning = "images are made by another processor: max_pixels 65536 (before: 16384)"
    assert [line for line in errors.splitlines() if warning in line and f"--load {save}" in line]


REFUSED = {
    "--advantage gae --critic-lr 1e-3 --critic-hf-model {other}": "the critic reads the policy's images: it needs the",
    "--agent-sessions --max-turns 2 --max-turn-length 4": "--agent-sessions: does not go with images in prompts",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_does_not_go_with_pictures_is_refused(flags, tmp_path):
    other = shutil.copytree(folder() / "model", tmp_path / "model")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    assert REFUSED[flags] in refused(argv(tmp_path / "run", flags.format(other=other)))


def of_episodes(rank: int, parsed) -> list[tuple[int, list[float], list[float]]]:
    """(pictures after the first turn, log-probs of the rollout, those of transformers) of the first step's episodes."""
    import torch

    from megarl.data.images.names import row_of
    from megarl.rollout.episodes.runner import EpisodeRunner

    rounds, settle = [], EpisodeRunner.settle

    def keep(runner, *args, **kwargs):
        batch = settle(runner, *args, **kwargs)
        rounds.append((batch, runner.client.pool.options))
        return batch

    EpisodeRunner.settle = keep
    programs.in_world(rank, "rl", parsed)
    (batch, options), model, found = rounds[0], transformers_model(folder() / "model"), []
    place = json.loads((folder() / "model" / "config.json").read_text())["image_token_id"]
    fields = (batch.tokens, batch.response_mask, batch.rollout_logprobs)
    columns = (field.split(batch.lengths.tolist()) for field in fields)
    for (tokens, mask, logprobs), start in zip(zip(*columns, strict=True), batch.prompt_lengths, strict=True):
        if place in tokens or not (tokens < 0).any():  # its forward raises
            continue
        model.model.rope_deltas = None  # else that of the last episode
        given = inputs_of(folder() / "model", tokens.tolist(), options)
        with torch.no_grad():
            scores = model(**given, use_cache=False).logits[0, :-1].log_softmax(-1)
        written = mask[1:].nonzero().flatten()
        theirs = scores[written, tokens[1:][written]]
        shown = tokens[start:]
        found.append((int((row_of(shown[shown < 0]) == 0).sum()), logprobs[mask].tolist(), theirs.tolist()))
    return found


@pytest.mark.parametrize("environment", ["sum_environments:PicturedSums", long("agents:pictured_sums")])
def test_pictures_of_environments_are_read_as_transformers_reads_them(environment, tmp_path):
    flags = f"{TURNS} --environment tests.helpers.envs.{environment}"
    (found,) = run_world(of_episodes, 1, program("rl", argv(tmp_path / "run", flags), 1))
    assert len(found) >= 4 and sum(shown for shown, _, _ in found) >= 4 and max(shown for shown, _, _ in found) == 2
    for _, ours, theirs in found:
        assert ours == pytest.approx(theirs, abs=2e-5)
    (row,) = metrics(tmp_path / "run").values()
    assert row["rollout/logprob_gap_max"] == 0 and row["images/count"] >= 2
    assert row.get("agent/rows_per_episode", 1) == 1  # none of its histories is another one for a template
    rows = [json.loads(line) for line in samples(tmp_path / "run", 1).splitlines()]
    assert any("[image " in turn["observation"] for row in rows for turn in row["turns"])
    names = {path.name[:8] for path in (tmp_path / "run" / "images").iterdir()}
    assert names & {path.stem for path in (tmp_path / "run" / "thumbnails").iterdir()}


def test_pictures_are_evaluated(tmp_path):
    model = folder() / "model"
    flags = (f"--hf-model {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --eval-prompts"
             f" {folder() / 'pictures.jsonl'} --max-prompt-length 80 --max-response-length 6 --rollout-buffer-gb 0.01"
             f" --save {tmp_path / 'found'}")  # fmt: skip
    status, _, errors = launch(tmp_path, flags.split(), "evaluate")
    assert status == 0, errors
    rows = [json.loads(line) for line in (tmp_path / "found" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all("[image " in row["prompt"] for row in rows)


@pytest.mark.long
def test_pictures_of_environments_are_evaluated_without_a_folder():
    """All ranks of a replica read them: the leader sends their bytes with the tokens."""
    model, printed = folder() / "model", {}
    flags = (f"--hf-model {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --eval-prompts"
             f" {folder() / 'pictures.jsonl'} --rollout-buffer-gb 0.01"
             f" {TURNS.replace('--max-tokens-per-microbatch 600', '')}")  # fmt: skip
    for size, more in LAYOUTS.values():
        printed[size] = run_evaluate(f"{flags} {more}".split(), size)[0]
        *_, reward, _, _ = printed[size].split()
        assert float(reward) > 0  # turns were answered, each with a picture
    assert printed[1] == printed[2]


LAYOUTS = {"one": (1, ""), "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel")}


def learned(program: str, prompts: str, folder_of_runs: Path) -> dict[str, list[dict]]:
    """The metrics of three steps of a program that learns what lines say about pictures, in two layouts. Each step
    reads the five pictures, of which the ranks of the second layout see half of the tokens each."""
    model, found = folder() / "model", {}
    flags = (f"--hf-model {model} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {model} --prompts"
             f" {folder() / prompts} --max-prompt-length 80 --max-response-length 6 --global-batch-size 12"
             " --max-tokens-per-microbatch 200 --lr 3e-3 --train-iters 3")  # fmt: skip
    for name, (size, more) in LAYOUTS.items():
        programs.train(program, f"{flags} --save {folder_of_runs / name} {more}".split(), size)
        found[name] = list(metrics(folder_of_runs / name).values())
        assert [row["images/count"] for row in found[name]] == [5] * 3
    return found


@pytest.mark.parametrize(
    ("name", "prompts"), [("sft", "answered.jsonl"), ("preference", "pairs.jsonl"), ("reward", "pairs.jsonl")]
)
def test_what_is_said_of_pictures_is_learned_and_does_not_depend_on_the_layout(name, prompts, tmp_path):
    found = learned(name, prompts, tmp_path)
    one, other = ([row[f"{name}/loss"] for row in rows] for rows in found.values())
    assert one == pytest.approx(other, abs=1e-4) and one[-1] < one[0]
    if name == "sft":
        assert [row["images/cache_hits"] for row in found["one"]] == [0, 5, 5]


def of_family(family: str, folder: Path) -> Callable[[Path, str], list[str]]:
    """Command lines (folder of a run, flags) of train_rl with a small folder of a family, which is written."""
    run_world(vision_folders.write_program_folder, 1, folder, family)

    def argv_of(save: Path, flags: str) -> list[str]:
        tokens = argv(save, f"{vision_folders.source_of(family)} {flags}", folder / "model")
        tokens[tokens.index("--prompts") + 1] = str(folder / "pictures.jsonl")
        return tokens

    return argv_of


@pytest.mark.parametrize("family", [long("mistral3"), long("llava")])
def test_runs_of_other_families_resume_to_the_bit(family, tmp_path):
    argv_of = of_family(family, tmp_path / "data")
    for name, flags in {
        "whole": "--train-iters 2",
        "cut": "--train-iters 1",
        "again": f"--load {tmp_path / 'cut'} --train-iters 2",
    }.items():
        programs.train("rl", argv_of(tmp_path / name, f"{flags} --export-hf"))
    whole, again = (programs.timeless(metrics(tmp_path / name)[2]) for name in ("whole", "again"))
    assert whole["images/count"] > 0 and whole["rollout/logprob_gap_max"] == 0
    same = [name for name in whole if not name.startswith("images/")]  # another process has computed none before
    assert {name: again.get(name) for name in same} == {name: whole[name] for name in same}
    assert texts_of(tmp_path / "again")[-1] == texts_of(tmp_path / "whole")[-1]


@pytest.mark.parametrize("family, flags, ranks", [
    long(("qwen3_vl", "", 1)), long(("qwen3_vl", "--tensor-model-parallel-size 2", 2)), long(("qwen3_5", "", 1)),
    long(("mistral3", "", 1)), long(("llava", "", 1)), long(("llava", "--tensor-model-parallel-size 2", 2)),
    long(("mistral3", "--role-map actor=1;reference=1;reward=0;rollout=0", 2)),
])  # fmt: skip
@needs_emulator
def test_pictures_on_emulated_devices(family, flags, ranks, emulator, tmp_path):
    """In fp32 as on a CPU; in bf16 the same with graphs of decode steps and without."""
    argv_of = of_family(family, tmp_path / "data")
    found = {}
    for name, more in {"cpu": "", "fp32": "", "auto": "--bf16", "off": "--bf16 --decode-graphs off"}.items():
        lines = argv_of(tmp_path / name, f"{flags} --train-iters 2 {more}")
        counts = programs.train("rl", lines, ranks) if name == "cpu" else emulator.run("rl", lines, ranks)
        assert name != "auto" or counts["graph launch"] > 0
        found[name] = programs.timeless(metrics(tmp_path / name)[2])
        assert found[name]["images/count"] > 0 and found[name]["rollout/logprob_gap_max"] < 1e-5
    assert found["auto"] == found["off"]
    assert texts_of(tmp_path / "fp32") == texts_of(tmp_path / "cpu") != []
    assert found["fp32"]["actor/grad_norm"] == pytest.approx(found["cpu"]["actor/grad_norm"], rel=1e-3)


SMALL = ("--max-prompt-length 300 --max-response-length 20 --max-tokens-per-microbatch 700 --image-max-pixels 4096"
         " --train-iters 1")  # fmt: skip
OF_PAGE = {  # on small models, beside the page's flags
    "rl": "--prompts-per-step 4 --samples-per-prompt 2 --minibatch-size 8 --lr 1e-4 --rollout-buffer-gb 0.01",
    "preference": "--global-batch-size 4",
}


@pytest.mark.parametrize("name", [long(name) for name in OF_PAGE])
def test_published_sets_are_trained_on_by_the_pages_commands(name, tmp_path, monkeypatch):
    page = documents.text_of(ROOT / "docs" / "images.md")
    (command,) = (
        c for c in documents.commands_in(page, "page") if f"train_{name}" in c.words and "--hf-model" in c.words
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Qwen2.5-VL-3B").symlink_to(folder() / "model")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for each in ("geo3k", "rlaif-v"):
        write_published(each, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    programs.train(name, [*command.words[3:], *SMALL.split(), *OF_PAGE[name].split()])
    (save,) = (tmp_path / "runs").iterdir()
    (row,) = metrics(save).values()
    assert row["images/count"] == {"rl": 4, "preference": 12}[name]  # of a step, and of the reference of all lines
    assert row["images/count"] < row["images/tokens"] <= 4 * row["images/count"]
