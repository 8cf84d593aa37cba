"""Routes from the rollout into the batch: of responses to train on only, and of buffered groups."""

import copy
import dataclasses
import functools
import operator

import pytest
import torch
import torch.distributed as dist

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm import role_mesh
from megarl.data.tokenizers import build_tokenizer
from megarl.groups import PromptGroups
from megarl.mcore.model.gpt import build_model
from megarl.observe.timers import Timers
from megarl.rollout import response_log
from megarl.rollout.group_buffer import GroupBuffer
from megarl.rollout.requests import PromptRequest
from megarl.rollout.response_log import Record
from megarl.rollout.rollout import Rollout
from tests.helpers.models.tiny_models import join_actor
from tests.helpers.programs import program, rl_argv
from tests.helpers.worlds import SAFETY, run_world


def passes(rank, parsed):
    """(routes of responses to train on, of an evaluation, of a greedy baseline; the layers; the engine's options)."""
    here, role = role_mesh.create_mesh(parsed.roles, SAFETY), parsed.roles["rollout"]
    tokenizer = build_tokenizer("SentencePieceTokenizer", parsed.settings.tokenizer_model)
    stages = build_model(parsed.roles["actor"].megatron, tokenizer.vocab_size, here["actor"].pg_collection)
    rollout, limit = (
        Rollout(parsed.settings, role, here, stages, tokenizer, Timers()),
        parsed.settings.max_response_length,
    )
    prompts = [PromptRequest(i, tokens, 2, limit, 0) for i, tokens in enumerate(([1, 2, 3], [4, 5, 6, 7]))]
    batches = [rollout.generate(prompts, 0, temperature) for temperature in (None, 0.7, 0)]
    assert all(batch.routes is None or len(batch.routes) == len(batch.tokens) for batch in batches)
    config = rollout.engine.context.config
    options = config.enable_prefix_caching, config.enable_chunked_prefill
    return [batch.routes for batch in batches], rollout.recorded_layers, options


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [0,1]"


@pytest.mark.parametrize("replay, options", [
    ("rollout", "--rollout-prefix-caching"), ("rollout", "--rollout-chunked-prefill"), ("old-logprob", ""),
])  # fmt: skip
def test_the_rollout_records_routes_for_training_only(replay, options, tmp_path):
    argv = rl_argv(tmp_path / "run", f"{EXPERTS} --router-replay {replay} {options}", warm_start=False)
    (((learnt, *others), layers, found),) = run_world(passes, 1, program("rl", argv, 1))
    assert others == [None, None] and found == ("prefix" in options, "chunked" in options)
    if replay == "rollout":
        assert layers == (2,) and learnt.shape[1:] == (1, 2) and 0 < (learnt < 0).all(2).sum() == 4
    else:
        assert layers is None and learnt is None


PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LAST = 99  # the last token of every sequence


def routes_of(tokens, layers):
    """[T, L, 2] int16, another route for each token and layer; −1 at a sequence's last token."""
    first = (tokens.unsqueeze(1) * 16 + torch.tensor(layers)).view(len(tokens), -1, 1)
    return torch.cat([first, first + 1000], dim=2).masked_fill((tokens == LAST).view(-1, 1, 1), -1).to(torch.int16)


def waiting_in(flags: str):
    """(`GroupBuffer`, role groups) of a rollout with MoE layer 2 in the first of two stages, 3 and 4 in the other."""
    place = join_actor(flags)[1]
    stage, stages = dist.get_rank(place.pg_collection.pp), dist.get_world_size(place.pg_collection.pp)
    layers = (2, 3, 4) if stages == 1 else [(2,), (3, 4)][stage]
    settings = Settings(samples_per_prompt=2, greedy_baseline=True, router_replay="rollout")
    return GroupBuffer(place, settings, layers), place


def contents(waiting) -> dict[int, list]:
    """Tokens of each sequence that waits on this rank, once its routes are known to be its own."""
    batch = waiting.batch
    assert batch.routes.dtype == torch.int16 and torch.equal(batch.routes, routes_of(batch.tokens, waiting.layers))
    return dict(zip(batch.sequence_ids.tolist(), [t.tolist() for t in batch.tokens.split(batch.lengths.tolist())]))


def put_away(rank: int, flags: str):
    """(this rank's contents, the record on rank 0) of four groups kept out of two rounds of three."""
    waiting, place = waiting_in(flags)
    for start, wanted in ((0, [1, 0, 1]), (50, [1, 1, 0])):
        lengths = torch.arange(6) % 3 + 2
        tokens = torch.cat([torch.cat([start + i * 4 + torch.arange(n - 1), torch.tensor([LAST])])
                            for i, n in enumerate(lengths.tolist())])  # fmt: skip
        whole = Batch(
            sequence_ids=torch.arange(6), lengths=lengths, prompt_lengths=torch.ones(6).long(), tokens=tokens,
            prompt_ids=torch.arange(6) // 2, finished=lengths > 2, baseline_scores=lengths / 2,
            response_mask=tokens > 3, rollout_logprobs=-tokens.float(), routes=routes_of(tokens, waiting.layers),
        )  # fmt: skip
        mine = (whole.sequence_ids // 2 % len(place.replicas) == place.dp_rank).nonzero().flatten()
        waiting.add(whole.select(mine), PromptGroups.equal(3, 2), torch.tensor(wanted).bool())
    return contents(waiting), waiting.to_record()


def taken_up(rank: int, flags: str, records: list[Record | None]):
    """The buffered groups of this rank, and saved again; runs with other layers or without routes reject them."""
    waiting, _ = waiting_in(flags)
    place, held = waiting.role_groups, waiting.layers
    for settings, layers, error, message in (
        (waiting.settings, (*held, 7), RuntimeError, r"rollout: .* MoE layers \[2, 3, 4\] and lack \[7\]"),
        (dataclasses.replace(waiting.settings, router_replay="none"), None, ValueError, "with the fields .*, routes,"),
    ):
        with pytest.raises(error, match=message):
            GroupBuffer(place, settings, layers).load(copy.deepcopy(list(filter(None, records))))
    waiting.load(filter(None, records))
    record = waiting.to_record()
    return contents(waiting), record and response_log.packed(*record)


def test_buffered_routes_resume_in_any_layout():
    ((everything, stored),) = run_world(put_away, 1, "")
    assert sorted(everything) == list(range(8)) and len({tuple(row) for row in everything.values()}) == 8
    held, files = zip(*run_world(put_away, 4, PP2), strict=True)
    assert held[0] != held[1] and functools.reduce(operator.or_, held) == everything
    assert files[0] and files[1] and files[2:] == (None, None), "one file of each replica"
    for flags in (PP2, TP2):
        held, again = zip(*run_world(taken_up, 2, flags, files), strict=True)
        assert functools.reduce(operator.or_, held) == everything and again == (response_log.packed(*stored), None)
