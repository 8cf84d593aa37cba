"""Clients of the generation server that others wrote: lm-eval, schemathesis; and the script of server and client."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.folders import hf_folders
from tests.helpers.launch_scripts import launch
from tests.helpers.programs import environment, inputs, write_lines
from tests.helpers.server.servers import ADMIN_KEY, scores, serve_argv, served

pytestmark = pytest.mark.nightly

LM_EVAL, SCHEMATHESIS = (str(Path(sys.executable).with_name(name)) for name in ("lm_eval", "schemathesis"))
CLIENTS = "the extra `clients` is not installed: bash launch/setup_env.sh test,clients"
# Flags of the evaluation alone.
OWN = "--min-p 0.01 --stop-token-ids 6 --rollout-dispatch static --reward=exact-match"
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {lines}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def test_the_script_of_server_and_client_gives_the_results_of_an_evaluation_alone(tmp_path):
    own, remote = (
        evaluate_argv(tmp_path / name, f"--eval-responses 2 --eval-temperature 1 {OWN}") for name in ("own", "remote")
    )
    run_evaluate(own)
    done = launch(remote, "serve_and_evaluate", NPROC="2")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / name / "evaluation.json").read_text())["metrics"] for name in ("own", "remote")]
    assert found[0] == found[1] and "the server is at http://127.0.0.1:" in done.stderr


def test_the_script_ends_with_the_status_of_the_side_that_failed(tmp_path):
    wrong_load = evaluate_argv(None, load=tmp_path / "nothing")
    done = launch(wrong_load, "serve_and_evaluate")
    assert done.returncode == 2 and "--load" in done.stderr
    done = launch(evaluate_argv(None, "--eval-k 5"), "serve_and_evaluate")
    assert done.returncode == 2 and "--eval-k" in done.stderr


@pytest.mark.skipif(not shutil.which(LM_EVAL), reason=CLIENTS)
def test_lm_eval_finds_the_log_likelihoods_of_this_process(tmp_path):
    rows = [
        {"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1), str((a + b + 5) % 20)], "label": 0}
        for a in range(9) for b in range(3)
    ]  # fmt: skip
    lines = write_lines(tmp_path / "sums.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(lines=lines))
    argv = serve_argv("--max-prompt-length 10 --max-response-length 6")
    with served(argv) as running:
        model = (
            f"model={running.model},base_url={running.url}/v1/completions,num_concurrent=8,max_length=16,max_gen_toks=1"
        )
        command = [LM_EVAL, "--model", "local-completions", "--model_args", model, "--tasks", "sums", "--include_path"]
        command += [str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
        done = subprocess.run(command, env=environment(HF_HUB_OFFLINE="1"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(rows)
    expected, sequences = [], []
    from megarl.data.tokenizers import build_tokenizer

    encode = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model")).encode
    for row in rows:
        for choice in row["choices"]:
            whole = encode(row["question"] + choice)
            sequences.append((len(encode(row["question"])), whole))
    scored = scores(argv, [whole for _, whole in sequences])
    for (start, whole), score in zip(sequences, scored, strict=True):
        pairs = list(zip(score.logprobs, score.top_logprobs, strict=True))[start:]
        is_greedy = all(logprob == best[0][1] for logprob, best in pairs)
        expected.append((sum(logprob for logprob, _ in pairs), is_greedy))
    answers = [
        tuple(answer) for sample in sorted(found, key=lambda s: s["doc_id"]) for answer in sample["filtered_resps"]
    ]
    assert [(float(value), str(greedy) == "True") for value, greedy in answers] == expected


@pytest.mark.skipif(not shutil.which(SCHEMATHESIS), reason=CLIENTS)
def test_schemathesis_finds_no_fault(tmp_path):
    """More than 10,000 requests from the server's own schema, right and wrong ones, and sequences of them."""
    folder = tmp_path / "model"
    hf_folders.write_folder("qwen2", folder)
    # A body above the limit is refused before it is read; what the schema allows may still be too long for the model.
    (tmp_path / "schemathesis.toml").write_text(
        "[checks]\nnegative_data_rejection.expected-statuses = [400, 401, 404, 405, 413, 415, 429, 503]\n"
        "positive_data_acceptance.enabled = false\n"
    )
    admin = tmp_path / "admin.keys"
    admin.write_text(ADMIN_KEY)
    flags = "--max-prompt-length 200 --max-response-length 56 --rollout-buffer-gb 0.02 --rollout-max-requests 32"
    flags += f" --admin-key-file {admin} --weights-folder {tmp_path} --request-timeout 60 --max-queue 64 --port 0"
    with served(["--hf-model", str(folder), *flags.split()]) as running:
        command = [SCHEMATHESIS, "run", f"{running.url}/openapi.json", "-H", f"Authorization: Bearer {ADMIN_KEY}"]
        command += ["-n", "1000", "--continue-on-failure", "--seed", "1", "--exclude-path", "/admin/pause"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        text = running.get("/metrics").data.decode()
        counts = re.findall(r'^megarl_requests_total\{.*status="(\d+)"\} (\S+)$', text, re.MULTILINE)
        assert sum(float(count) for _, count in counts) > 10_000
        assert not [status for status, _ in counts if status == "500"]
