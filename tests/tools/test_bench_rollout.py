"""Benchmarks against other libraries, without those libraries: cases, export, rounds, numbers, wrong use."""

import json
import statistics
import sys

import pytest
import torch

from tests.helpers.folders import hf_folders
from tests.helpers.forked_programs import check
from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import common, image_step, logprob, lora_step, rollout, step, tables


def test_rollout_cases_are_those_described():
    plain, prefix, ragged = (rollout.CASES[name]() for name in ("plain", "prefix", "ragged"))
    assert [len(prompt) for prompt in plain.prompts[:8]] == [16, 17, 18, 19, 20, 21, 22, 16]
    assert len(plain.requests()) == 32 and {r.max_new_tokens for r in plain.requests()} == {64}
    requests = prefix.requests()
    assert len(requests) == 128 and requests[0].prompt == requests[15].prompt != requests[16].prompt
    assert {len(r.prompt) for r in requests} == {384} and len({r.key for r in requests}) == 128
    assert len(ragged.new_tokens) == 64 and max(ragged.new_tokens) == 512
    assert 0.25 * 64 < statistics.median(ragged.new_tokens) < 2 * 64  # of the drawn ones: 64
    assert 4 < 512 * 64 / sum(ragged.new_tokens) < 8  # what padding to the longest costs


def test_the_cache_of_a_case_is_large_enough():
    case = rollout.Case([[3] * 10], 4, [6] * 4)
    token = 2 * 4 * 12 * 4 * 64  # key and value, bytes of a number, layers, groups, channels
    assert 4 * 16 * token < rollout.buffer_gb(case) * 2**30 < 5 * 16 * token


def test_a_side_that_generates_other_lengths_is_not_timed():
    requests = rollout.Case([[3, 4]], 2, [2, 3]).requests()
    assert rollout.timed(lambda asked: [[7] * r.max_new_tokens for r in asked], requests) >= 0
    with pytest.raises(RuntimeError, match="other lengths"):
        rollout.timed(lambda asked: [[7] * 2 for _ in asked], requests)
    assert [r.max_new_tokens for r in rollout.shorten(requests)] == [4, 4]


def test_step_inputs(tmp_path):
    from megarl.data.tokenizers import build_tokenizer

    for name, case in step.CASES.items():
        step.make_inputs(tmp_path, case)
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
        ids = tokenizer.encode_batch(prompts)
        assert tokenizer.vocab_size == case.vocab and tokenizer.eos_id == 1, name
        assert [len(each) for each in ids] == [16, 17, 18, 19, 20, 21, 22, 16]
        assert tokenizer.decode(ids[0]) == prompts[0]


def test_step_flags_are_allowed(tmp_path):
    from megarl import arguments

    found = arguments.parse(step.megarl_flags(tmp_path, step.CASES["ragged"], 4), 1, "rl")
    assert (found.settings.prompts_per_step, found.settings.samples_per_prompt, found.settings.train_iters) == (8, 8, 4)
    assert set(found.roles) == {"actor", "reward", "rollout"}
    assert step.distinct("w3 w4 w3") == 2 / 64


def test_logprob_cases():
    plain, gradient, ragged = (logprob.CASES[name]() for name in ("plain", "gradient", "ragged"))
    assert plain.lengths == gradient.lengths == [128] * 16 and (plain.gradient, gradient.gradient) == (False, True)
    assert max(ragged.lengths) == 256 and [len(row) for row in ragged.sequences()] == ragged.lengths


def llama_logprobs(weights: dict, tokens: torch.Tensor, shape: common.Shape, epsilon: float) -> torch.Tensor:
    """[L − 1] log-probs of a sequence's tokens under Llama as its paper has it, from the exported weights."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weights[name]

    def turn(x):  # [heads, L, D]: channel i with channel i + D/2, arXiv 2104.09864 eq. 34
        half = x.shape[-1] // 2
        angle = torch.arange(len(tokens))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        one, two = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    hidden_from = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (y @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (part.unflatten(-1, (-1, shape.hidden // shape.heads)).transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(shape.heads // shape.groups, 0) for part in (turn(k), v))
        scores = turn(q) @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        y = scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(0, 1).flatten(1) @ weights[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    logits = norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
    return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


def export_differs_by(rank: int) -> tuple[float, list]:
    from megarl.mcore.model import forward_pass

    chunk, _, args = common.build(SMALL, (16, 16), "--init-method-std 0.2")
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    weights = common.llama_weights(chunk, SMALL)
    (tokens,) = map(torch.tensor, common.random_prompts([20], SMALL.vocab))
    with torch.no_grad():
        ours = forward_pass.token_scores(chunk, tokens, torch.tensor([20]), 1.0, SMALL.vocab).logprobs[1:]
        theirs = llama_logprobs(weights, tokens, SMALL, chunk.config.layernorm_epsilon)
    return float((ours - theirs).abs().max()), sorted((name, tuple(value.shape)) for name, value in weights.items())


def test_exported_weights_are_those_of_a_llama():
    ((found, shapes),) = run_world(export_differs_by, 1)
    assert found < 5e-5
    assert dict(shapes)["lm_head.weight"] == (40, 32)  # without the padding of the vocabulary
    assert len(shapes) == 3 + 2 * 9


def test_models_that_differ_are_not_timed():
    common.refuse_different(common.TOLERANCE)
    for found in (2 * common.TOLERANCE, float("nan")):
        with pytest.raises(common.Unusable, match="differ"):
            common.refuse_different(found)


def test_rounds_alternate(capsys):
    called = []
    sides = {name: lambda name=name: called.append(name) or float(len(called)) for name in ("megarl", "hf")}
    assert common.alternate(sides, 3) == {"megarl": [1.0, 4.0, 5.0], "hf": [2.0, 3.0, 6.0]}
    assert called == ["megarl", "hf", "hf", "megarl", "megarl", "hf"]
    assert "round 3 hf: 6.000 s" in capsys.readouterr().out


def test_numbers_and_tables(tmp_path, capsys):
    found = common.report("plain", {"megarl": [2.0, 1.0, 9.0], "hf": [6.0, 5.0, 4.0]}, {"tokens": 100}, mean_length=3)
    assert found["ratio"] == {"hf": 2.5} and found["mean_length"] == 3
    assert found["sides"]["megarl"] == {"median_s": 2.0, "seconds": [2.0, 1.0, 9.0], "tokens_per_s": 50.0}
    assert common.table(found, markdown=True).splitlines() == [
        "| plain | megarl | 2.00 s | 50 tokens/s |  |",
        "| plain | hf | 5.00 s | 20 tokens/s | 2.50 |",
    ]
    peaks = {"peak_bytes": {"megarl": 2**20, "hf": 2**31}}
    assert common.table(found | peaks, markdown=True).endswith("| 2.50 | 2,048 MiB |")
    args = common.parsed(common.parser("text", {"plain": None}, 3), ["--json", str(tmp_path / "out.json")])
    common.publish(found, args, SMALL)
    assert json.loads((tmp_path / "out.json").read_text()) == found | {"model": vars(SMALL)}
    assert "2.50" in capsys.readouterr().out


@pytest.mark.parametrize("bench", [rollout, step, logprob])
def test_wrong_flags(bench, refusal):
    for argv, message in ((["--case", "fast"], "'fast'"), (["--rounds", "0"], "--rounds 0: must be at least 1")):
        assert message in refusal(bench.main, argv)


def test_wrong_peers(refusal):
    cases = ((["--peers", "hf,tgi"], "--peers tgi: allowed are hf, hf-batch"),
             (["--vllm-python", "no-such-python"], "--vllm-python no-such-python: no such program"))  # fmt: skip
    for argv, message in cases:
        assert message in refusal(rollout.main, argv)


def test_peers_that_are_missing(capsys):
    assert common.installed({"a": "torch", "b": "no_such_library"}) == ["a"]
    assert capsys.readouterr().out == "b is not installed: skipped\n"
    with pytest.raises(common.Unusable, match=r"pip install megarl\[bench\]"):
        common.installed({"b": "no_such_library"})


def test_lora_step_has_the_same_work_on_both_sides(tmp_path):
    from megarl import arguments
    from megarl.data.prompts import load_prompts

    hf_folders.write_folder("smollm2", tmp_path / "model")
    lora_step.make_inputs(tmp_path)
    flags = [*lora_step.megarl_flags(tmp_path, tmp_path / "model", 4)]
    found = arguments.parse(flags, 1, "rl")
    assert (found.settings.prompts_per_step, found.settings.samples_per_prompt, found.settings.train_iters) == (8, 8, 4)
    factors = found.roles["actor"].lora
    assert (factors.rank, factors.alpha, list(factors.targets)) == (16, 32, lora_step.TARGETS)
    ours = [(prompt.text, prompt.answer) for prompt in load_prompts(str(tmp_path / "train.jsonl"))]
    theirs = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert ours == [(chat["prompt"][0]["content"], chat["answer"]) for chat in theirs]
    for response, right in [("6 * 7 = 42.", 1.0), ("42 or 43", 0.0), ("", 0.0)]:
        assert lora_step.is_right(response, "42") == right


def picture_inputs(rank: int, folder):
    image_step.make_folder(folder, step.CASES["ragged"])


def test_image_step_has_other_pictures_in_each_step_and_prompts_of_one_length(tmp_path):
    run_world(picture_inputs, 1, tmp_path)
    status, printed, _ = check([*image_step.megarl_flags(tmp_path, step.CASES["ragged"], 4), "--check"])
    assert status == 0 and "[image 256×256 " in printed
    lines = printed.splitlines()
    (first,) = [line for line in lines if line.startswith("  first")]
    image_step.refuse_other_prompts(int(first.split()[1]))
    assert any(f"{image_step.PICTURES} images; tokens of an image: median {image_step.ROWS}" in line for line in lines)
    assert (image_step.MOST_STEPS + step.WARM_UP) * step.PROMPTS == image_step.PICTURES
    with pytest.raises(common.Unusable, match="a prompt has 85 tokens, not 84"):
        image_step.refuse_other_prompts(85)


def test_image_step_refuses_steps_that_would_show_a_picture_twice(refusal):
    assert "--steps 16: allowed is 1 to 15" in refusal(image_step.main, ["--steps", "16"])


def test_lora_step_needs_a_model_and_both_libraries(tmp_path, monkeypatch, refusal):
    line = refusal(lora_step.main, ["--model", str(tmp_path)])
    assert f"--model {tmp_path}: no Hugging Face folder, it has no config.json" in line
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(lora_step, "PEERS", ("torch", "no_such_library"))
    with pytest.raises(common.Unusable, match=r"pip install megarl\[bench\]"):
        lora_step.main(["--model", str(tmp_path)])


@pytest.mark.parametrize("bench", [rollout, step, logprob])
def test_a_benchmark_without_any_peer_says_what_to_install(bench, monkeypatch):
    monkeypatch.setattr(bench, "PEERS", dict.fromkeys(bench.PEERS, "no_such_library"))
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail
    with pytest.raises(common.Unusable, match=r"pip install megarl\[bench\]"):
        bench.main([])


def test_whole_tables():
    lines = [["case", "ratio"], ["move", "1.12"]]
    assert tables.whole_table(lines, markdown=False, width=6) == "  case ratio\n  move  1.12"
    assert tables.whole_table(lines, markdown=True, width=6) == "| case | ratio |\n| --- | --- |\n| move | 1.12 |"


def end_ids_of_a_run(rank: int, name: str, folder) -> tuple[int, ...]:
    """The ids that end a response in the benchmark's run of a case, which is not trained here."""
    from megarl.data.tokenizers_hf import HuggingFaceTokenizer

    step.make_inputs(folder, step.CASES[name])
    step.train_megarl = lambda folder, flags: HuggingFaceTokenizer(str(folder)).end_ids
    return step.run_megarl(folder, step.CASES[name], [])


def test_responses_of_the_fixed_case_have_no_end_token(tmp_path):
    ends = {}
    for name in step.CASES:
        (tmp_path / name).mkdir()
        (ends[name],) = run_world(end_ids_of_a_run, 1, name, tmp_path / name)
    assert ends == {"fixed": (), "ragged": (1,)}
