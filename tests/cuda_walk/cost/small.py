"""Predicts a small run, for tests."""

import torch.distributed as dist

from tests.cuda_walk.device import Walk

LAYERS, HIDDEN, FFN, VOCAB, CHANNELS, HEADS, GROUPS = 2, 512, 1536, 4096, 64, 8, 4
PROMPT, RESPONSE, SEQUENCES = 64, 64, 8
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --group-query-attention"
    f" --num-query-groups {GROUPS} --ffn-hidden-size {FFN} --swiglu --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --lr 1e-5 --prompts none.jsonl"
    f" --reward exact-match --max-prompt-length {PROMPT} --max-response-length {RESPONSE}"
    f" --prompts-per-step {SEQUENCES} --samples-per-prompt 1 --advantage reinforce++ --kl-coefficient 0"
    f" --rollout-buffer-gb 1 --rollout-max-requests {SEQUENCES} --max-tokens-per-microbatch 512"
)


def predicted(walk: Walk) -> dict[str, dict]:
    """What is counted of each phase."""
    from megarl.planning.question import Question
    from tests.cuda_walk.cost.phases import walk_all
    from tests.cuda_walk.cost.timeline import predict

    dist.destroy_process_group()  # each role has a world of its own
    price = Question(FLAGS.split(), 1, None, VOCAB).price()
    return {phase.name: vars(predict(phase.events)) | {"calls": phase.calls} for phase in walk_all(walk, price, 1)}


SCENARIOS = {"cost": (predicted, 1)}  # name -> (what walks, ranks)
