"""vLLM's side of the rollout benchmark: runs in vLLM's own interpreter, without megarl.

    INTERPRETER vllm_side.py FOLDER [REQUESTS]      (tools/bench/rollout.py and all.py start it)

FOLDER has the model in Hugging Face's format and REQUESTS, by default requests.json. Prints a line "seconds 0" when it
is ready, then a line "seconds S" for each line of stdin: the time in which it answered all requests.
"""

import json
import os
import sys
import time
from pathlib import Path


def main():
    """Loads the model, warms up and serves rounds."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run the engine in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    folder = Path(sys.argv[1])
    work = json.loads((folder / (sys.argv[2:] or ["requests.json"])[0]).read_text())
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work["requests"]]
    settings = [
        SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        for _, new in work["requests"]
    ]
    engine = LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, dtype="float32", max_model_len=work["longest"],
        max_num_seqs=len(prompts), enable_prefix_caching=True, disable_log_stats=True,
    )  # fmt: skip
    engine.generate(prompts[:4], settings[:4], use_tqdm=False)
    print("seconds 0", flush=True)
    for _ in sys.stdin:
        engine.reset_prefix_cache()  # as after a weight sync, cached blocks may not be reused
        started = time.perf_counter()
        found = engine.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = [len(answer.outputs[0].token_ids) for answer in found]
        if lengths != [new for _, new in work["requests"]]:
            sys.exit(f"vLLM generated {sum(lengths)} tokens, not the requested lengths")
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
