"""Routers of transformers' modules: planted routes against the module's own code, recorded ones to the bit."""

import functools

import pytest
import torch
from torch.nn import functional

from tests.helpers.folders import any_measures, any_types
from tests.helpers.forked_programs import refusal
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

TP2, FSDP = "--tensor-model-parallel-size 2", "--use-torch-fsdp2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SEQUENCES = [list(range(3, 3 + length)) for length in (9, 17, 5)]


def softmax(router, logits, chosen):
    gates = logits.softmax(-1).gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True) if router.norm_topk_prob else gates


def ernie(router, logits, chosen):
    gates = logits.softmax(-1).gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True).clamp(min=router.norm_min)


def sigmoid(router, logits, chosen):
    gates = logits.sigmoid().gather(1, chosen)
    return gates / gates.sum(-1, keepdim=True) * router.routed_scaling_factor


def of_logits(router, logits, chosen):
    return logits.gather(1, chosen).softmax(-1)


# Gates of given experts by type: by value, through statics, in groups with a bias, and of logits.
GATES = {"qwen3_moe": softmax, "ernie4_5_moe": ernie, "deepseek_v3": sigmoid, "gpt_oss": of_logits}
ROWS = [(kind, flags) for kind in GATES for flags in ("", TP2, FSDP, FULL)]


def planted(layers: int, experts: int) -> torch.Tensor:
    """[T, L, 2] two ascending experts of each token and layer."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(sum(map(len, SEQUENCES)), layers, experts, generator=generator).topk(2).indices
    return drawn.sort(-1).values


def forced(_, kind: str, folder) -> tuple:
    """(log-probs, gradients of routers) of the module alone, whose routers choose what is planted."""
    model = any_measures.loaded(folder)
    named = [(name, each) for name, each in model.named_modules() if type(each).__name__.lower().endswith("topkrouter")]
    routes, start, logprobs = planted(len(named), any_types.SMALL["num_experts"]), 0, []

    def forward(router, number, hidden):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = functional.linear(hidden, router.weight, getattr(router, "bias", None))
        chosen = routes[start : start + len(hidden), number]
        return logits, GATES[kind](router, logits, chosen), chosen

    for number, (_, router) in enumerate(named):
        router.forward = functools.partial(forward, router, number)
    for ids in map(torch.tensor, SEQUENCES):
        rows = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        logprobs.append(rows.gather(1, ids[1:, None])[:, 0])
        start += len(ids)
    torch.cat(logprobs).sum().backward()
    return [each.detach() for each in logprobs], {f"hf.{name}.weight": each.weight.grad for name, each in named}


def replayed(_, folder, flags: str):
    """(log-probs with planted routes, gradients of routers, (live log-probs, disagreement) of planted ones)."""
    from megarl.batch import Batch
    from megarl.mcore.model.forward_pass import token_scores
    from megarl.router_replay.router_state import RouteTable
    from tests.helpers.models.lora_models import whole_gradients
    from tests.helpers.models.updates import split_microbatches

    model, place = any_measures.trainable(folder, flags)
    vocabulary = model.role.model_vocab_size(0)
    state, mine = model.router_state, torch.arange(len(SEQUENCES))[place.dp_rank :: len(place.replicas)]
    lengths = torch.tensor([len(row) for row in SEQUENCES])
    batch = Batch(sequence_ids=torch.arange(len(lengths)), lengths=lengths, tokens=torch.tensor(sum(SEQUENCES, [])))
    positions = batch.token_positions(mine)
    batch = batch.select(mine)
    everywhere = torch.arange(len(batch.tokens))

    def forward(chunk, part):
        return token_scores(chunk, part.tokens, part.lengths, 1.0, vocabulary, part.routing)

    def loss(out, part):
        firsts = part.lengths.cumsum(0) - part.lengths
        kept = torch.ones_like(out.logprobs, dtype=torch.bool).index_fill_(0, firsts, False)
        return out.logprobs.masked_fill(~kept, 0.0).sum(), out.logprobs.detach()

    def scores(table):
        state.begin_step()
        state.replayed_routes = table
        microbatches = split_microbatches(batch, 1, 1)
        state.attach(batch, microbatches)
        ((found, _),) = model.forward_only(microbatches, forward)
        return found.logprobs, state.record(batch, microbatches), state.metrics("router", table is not None)

    live, table, metrics = scores(None)
    again, _, own = scores(table)
    assert torch.equal(live, again) and own["router/disagreement"] == 0 and "router/load_imbalance" in metrics
    routes = planted(len(state.layers), state.experts)[positions].short()
    table = RouteTable.of_rows(everywhere, routes, len(batch.tokens))
    found, _, metrics = scores(table)
    assert metrics["router/disagreement"] > 0.3 and float((found - live).abs().max()) > 0.1
    state.begin_step()
    state.replayed_routes = table
    microbatches = split_microbatches(batch, 1, 1)
    state.attach(batch, microbatches)
    results, *_ = model.update(microbatches, forward, loss)
    assert torch.equal(results[0], found)
    for parameter in model.model.parameters():  # a bias of the choice alone gets none
        parameter.main_grad = torch.zeros_like(parameter) if parameter.main_grad is None else parameter.main_grad
    rows = dict(zip(mine.tolist(), (row[1:] for row in found.split(batch.lengths.tolist())), strict=True))
    return rows, whole_gradients(model.model, place.pg_collection)


@pytest.mark.parametrize(("kind", "flags"), by_default(ROWS, [("qwen3_moe", FULL), ("deepseek_v3", "")]))
def test_planted_routes_are_replayed(kind, flags, tmp_path):
    any_types.save(kind, tmp_path / kind)
    ((expected, gradients),) = run_world(forced, 1, kind, tmp_path / kind)
    found = run_world(replayed, 2 if flags in (TP2, FSDP) else 1, tmp_path / kind, flags)
    assert len(gradients) >= 5
    for rows, grads in found:
        for number, row in rows.items():
            assert float((row - expected[number]).abs().max()) < 2e-5
        for name, grad in gradients.items():
            assert grad.abs().max() > 0 and (grads[name] - grad).norm() < 5e-5 * grad.norm(), name
    assert {number for rows, _ in found for number in rows} == set(range(len(SEQUENCES)))


def test_routers_without_topk_are_refused_only_for_replay(tmp_path):
    any_types.save("phimoe", tmp_path / "phimoe")
    argv = (
        f"--hf-model {tmp_path}/phimoe {any_measures.FLAGS} --max-prompt-length 8 --max-response-length 8 --prompts x"
    )
    says = refusal([*argv.split(), *"--advantage grpo --reward length --router-replay rollout".split()])
    assert "--router-replay rollout: allowed is none: PhimoeForCausalLM: a router does not choose its experts" in says
