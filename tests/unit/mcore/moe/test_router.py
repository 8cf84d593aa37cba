"""Routers: gates and gradient of replay, recomputation, models of one process, numbers of layers; balancing by the
papers' formulas in float64 and by Megatron's functions, errors."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megarl.mcore.model.forward_pass import token_scores
from megarl.mcore.model.gpt import build_frozen_model
from megarl.mcore.moe.router import finish_update, moe_layers_of, recording_routes, routers_of
from megarl.mcore.moe.routes import NO_ROUTE, RoutedTokens, Routing
from tests.helpers.models import routings
from tests.helpers.models.tiny_models import build, build_stages, ragged_tokens
from tests.helpers.worlds import on_each_rank


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@on_each_rank()
def test_gates_of_replayed_experts_are_live_and_trained(rank, scoring):
    model, _, place = build(f"{routings.MOE} --moe-router-score-function {scoring}")
    layer, (_, lengths) = model.decoder.layers[1].mlp, ragged_tokens(routings.LENGTHS)
    tokens = int(lengths.sum())
    routing = routings.routing_of(model, place, routings.LENGTHS, routings.random_routes(tokens, 2))
    routing.replayed[~routing.rows.counted] = NO_ROUTE
    hidden = torch.randn(tokens, 1, 64, generator=torch.Generator().manual_seed(1))
    upward = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    weight = layer.router.weight
    found = []
    for by_formula in (False, True):
        x = hidden.clone().requires_grad_()
        weight.grad = None
        if by_formula:
            output = replay_formula(layer, x.squeeze(1), routing, scoring)
        else:
            with layer.router.routed(routing):
                output = layer(x)[0].squeeze(1)
        (output * upward).sum().backward()
        found.append((output.detach(), x.grad.squeeze(1), weight.grad.clone()))
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]
    assert max(errors) < 1e-5


def replay_formula(layer, x, routing: Routing, scoring: str):
    """Σ g_i E_i(x), gates of live scores over the replayed set alone (2510.11370 §3; sigmoid: 2412.19437 eq. 13)."""
    scores = x @ layer.router.weight.T
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    live = scores.topk(2, dim=1).indices
    indices = torch.where(routing.rows.counted.unsqueeze(1), routing.replayed[:, 1].long(), live)
    chosen.scatter_(1, indices, True)
    raw = scores.exp() if scoring == "softmax" else scores.sigmoid()
    gates = raw * chosen / (raw * chosen).sum(1, keepdim=True)
    outputs = [expert(x, torch.ones(len(x)))[0] for expert in layer.experts.local_experts]
    return sum(gates[:, i : i + 1] * output for i, output in enumerate(outputs))


@on_each_rank()
def test_a_recomputation_counts_no_token_again(rank):
    model, _, place = build(routings.MOE)
    tokens, lengths = ragged_tokens(routings.LENGTHS)
    routing, found = routings.routing_of(model, place, routings.LENGTHS, routings.random_routes(len(tokens), 2)), []
    for _ in range(2):
        token_scores(model, tokens, lengths, 1.0, 20, routing)
        found += [routing.load.clone(), routing.differs.clone()]
    load, differs, load_again, differs_again = found
    assert load.sum() > 0 and torch.equal(load, load_again)
    assert differs.sum() > 0 and torch.equal(differs, differs_again)


@on_each_rank()
def test_models_of_a_process_do_not_share_routers(rank):
    """Sizes of Megarl's and Megatron's list of routers while models are built, and while one of them records."""
    sizes = lambda: len(RouterReplay.global_router_replay_instances)  # noqa: E731
    model, args, place = build(routings.MOE)
    found = [sizes()]
    other = build_frozen_model(args, 20, place.pg_collection)
    found.append(sizes())
    with recording_routes(model):
        found.append(sizes())
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        actions = [[r.router_replay.router_replay_action for r in routers_of(m)] for m in (model, other)]
        assert actions == [[RouterReplayAction.RECORD] * 2, [None] * 2]
        assert model.config.moe_enable_routing_replay and not other[0].config.moe_enable_routing_replay
    assert not model.config.moe_enable_routing_replay
    assert all(r.router_replay.router_replay_action is None for r in routers_of(model))
    assert all(r.router_replay.replay_backward_list == [] for r in routers_of(model))
    assert [*found, sizes()] == [0, 0, 2, 0]


@pytest.mark.parametrize("flags, expected", [
    ("--moe-layer-freq [0,0,1,1,1,1,1,1]", [(3, 4), (5, 6, 7, 8)]),
    ("--moe-layer-freq [0,0,1,1,1,1,1,1] --num-layers-per-virtual-pipeline-stage 2", [(5, 6), (3, 4, 7, 8)]),
    ("--moe-layer-freq 2", [(1, 3), (5, 7)]),
])  # fmt: skip
@on_each_rank(2)
def test_layers_are_numbered_over_the_whole_model(rank, flags, expected):
    stages, _, place = build_stages(f"{routings.MOE} --num-layers 8 --pipeline-model-parallel-size 2 {flags}")
    assert dist.get_rank(place.pg_collection.pp) == rank and moe_layers_of(stages) == expected[rank]


# -- balancing --------------------------------------------------------------------------------------------------------

EXPERTS, TOPK = 8, 3
MOE = f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 32"
SEQ = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5"
GLOBAL = SEQ.replace("seq_aux", "global_aux")
Z = "--moe-z-loss-coeff 0.5"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
LENGTHS, PADDING = [5, 1, 7, 2], 3


def rows_of(lengths: list[int], padding: int):
    """Rows of a rank that sees all tokens of a micro-batch."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, padding]))
    is_last = torch.cat([sequence[1:] != sequence[:-1], torch.ones(1, dtype=torch.bool)])
    counted, rows = (sequence < len(lengths)) & ~is_last, torch.arange(len(sequence))
    return RoutedTokens(rows, counted.long(), (rows, sequence, counted), len(lengths))


class Case:
    """A router with random weights, hidden states of random tokens, and their routing."""

    def __init__(self, flags: str, lengths=LENGTHS, padding: int = PADDING, more: int = 1, replays: bool = False):
        """`more`: how often the mini-batch has the tokens and sequences of this micro-batch."""
        model, args, _ = build(f"{MOE} {flags}")
        self.router, draw = model.decoder.layers[1].mlp.router, torch.Generator().manual_seed(1)
        self.rows = rows_of(lengths, padding)
        count, layers = len(self.rows.token_indices), (1, 2)
        with torch.no_grad():
            self.router.weight.normal_(generator=draw)
            if self.router.has_share:
                self.router.expert_share.copy_(torch.rand(EXPERTS, generator=draw).softmax(0))
        self.hidden = torch.randn(count, args.hidden_size, generator=draw).requires_grad_()
        counted = self.rows.counted
        numbers = counted.sum(), (torch.tensor(lengths) > 1).sum()
        self.replayed = None
        if replays:  # three neighbours that the router itself has no reason to choose
            first = torch.randint(EXPERTS - 2, (count, len(layers), 1), generator=draw)
            self.replayed = (first + torch.arange(TOPK)).to(torch.int16)
        self.routing = Routing("actor", layers, EXPERTS, self.rows, self.replayed)
        self.routing.totals = tuple(torch.tensor(more * n).double() for n in numbers)

    def run(self, routing="own"):
        """Gates and map of the tokens."""
        with self.router.routed(self.routing if routing == "own" else routing):
            return self.router(self.hidden.unsqueeze(1))

    def gradients(self):
        """Gradients (of hidden states, of the router's weight) of the losses alone."""
        gates, _ = self.run()
        (gates * 0).sum().backward()
        return self.hidden.grad, self.router.weight.grad


def scores_of(logits, kind: str):
    """Each token's scores, normalized over the experts, in the precision of the logits."""
    scores = {
        "softmax": logits.exp(), "sigmoid": 1 / (1 + (-logits).exp()), "sqrtsoftplus": (1 + logits.exp()).log().sqrt(),
    }[kind]  # fmt: skip
    return scores / scores.sum(1, keepdim=True)


def z_loss(logits, case, kind):
    """Mean over all tokens x of the mini-batch of (log Σ exp x)²: 2202.08906 eq. 5."""
    terms = [x.exp().sum().log() ** 2 for x, counts in zip(logits, case.rows.counted, strict=True) if counts]
    return sum(terms) / case.routing.totals[0]


def sequence_loss(logits, case, kind):
    """Mean over sequences of Σ f_i P_i: 2412.19437 eq. 17-20."""
    total = 0.0
    for number in range(len(LENGTHS)):
        scores = scores_of(logits[(case.rows.occurrences[1] == number) & case.rows.counted], kind)
        if len(scores):
            best = [set(row.topk(TOPK).indices.tolist()) for row in scores]
            shares = [EXPERTS / (TOPK * len(scores)) * sum(i in row for row in best) for i in range(EXPERTS)]
            total = total + sum(f * scores[:, i].sum() / len(scores) for i, f in enumerate(shares))
    return total / case.routing.totals[1]


def global_loss(logits, case, kind):
    """E Σ f_i P_i: 2101.03961 eq. 4-6, with the shares f that the router holds."""
    scores = scores_of(logits, kind)[case.rows.counted].sum(0) / case.routing.totals[0]
    return EXPERTS * sum(f * p for f, p in zip(case.router.expert_share.double(), scores, strict=True))


FORMULAS = {
    "z": (Z, "z_loss", z_loss, "softmax"),
    "sequence-softmax": (SEQ, "aux_loss", sequence_loss, "softmax"),
    "sequence-sigmoid": (f"{SEQ} {BIAS}", "aux_loss", sequence_loss, "sigmoid"),
    "sequence-sqrtsoftplus": (f"{SEQ} --moe-router-score-function sqrtsoftplus", "aux_loss", sequence_loss,
                              "sqrtsoftplus"),
    "global-softmax": (GLOBAL, "aux_loss", global_loss, "softmax"),
    "global-sigmoid": (f"{GLOBAL} {BIAS}", "aux_loss", global_loss, "sigmoid"),
}  # fmt: skip


@on_each_rank()
def test_losses_and_their_gradients_are_the_papers(rank):
    for name in FORMULAS:
        check_formula(name)
    check_formula("sequence-sigmoid", replays=True)  # losses teach the router's own choice, whatever is replayed


def check_formula(name: str, replays: bool = False):
    flags, key, formula, kind = FORMULAS[name]
    case = Case(flags, more=3, replays=replays)
    found = case.gradients()
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.router.weight))
    loss = formula(hidden @ weight.T, case, kind)
    expected = torch.autograd.grad(0.5 * loss, (hidden, weight))
    assert float(case.routing.losses[key]) == pytest.approx(float(loss), rel=1e-5)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-5)
        assert float(exact.abs().max()) > 1e-3
    assert not found[0][~case.rows.counted].any()


@on_each_rank()
def test_several_losses_add_up_with_their_own_coefficients(rank):
    case = Case(f"{Z} --moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.25 0.125")
    found = case.gradients()
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.router.weight))
    parts = [formula(hidden @ weight.T, case, "softmax") for formula in (z_loss, global_loss, sequence_loss)]
    assert float(case.routing.losses["aux_loss"]) == pytest.approx(float(parts[1] + parts[2]), rel=1e-5)
    expected = torch.autograd.grad(0.5 * parts[0] + 0.25 * parts[1] + 0.125 * parts[2], (hidden, weight))
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-5)


@on_each_rank()
def test_losses_equal_megatrons_if_they_mean_the_same(rank):
    """One sequence, where a mean over the micro-batch is the mean over the sequence and over the mini-batch."""
    for flags in (f"{SEQ} {Z}", f"{GLOBAL} {Z}"):
        case = Case(flags, lengths=[30], padding=0)
        logits = (case.hidden @ case.router.weight.T)[case.rows.counted].detach()
        chosen, scores = compute_routing_scores_for_aux_loss(logits, TOPK, "softmax")
        if case.router.has_share:
            case.router.expert_share.copy_(chosen.sum(0) / chosen.sum())
        expected = switch_load_balancing_loss_func(scores, chosen.sum(0), len(logits), TOPK, EXPERTS, 1.0)
        case.run()
        assert float(case.routing.losses["aux_loss"]) == pytest.approx(float(expected), rel=1e-5)
        assert float(case.routing.losses["z_loss"]) == pytest.approx(float(z_loss_func(logits, 1.0)), rel=1e-5)


@on_each_rank()
def test_biases_and_loads_follow_the_chosen_experts(rank):
    """Replayed ones, too."""
    for replays in (False, True):
        check_counts(replays)


def check_counts(replays: bool):
    """Two micro-batches, then an update that is skipped, then one that is applied."""
    case = Case(f"{GLOBAL} {BIAS}", replays=replays)
    router, bias, share = case.router, case.router.expert_bias.clone(), case.router.expert_share.clone()
    _, chosen = case.run()
    if replays:
        assert torch.equal(chosen.nonzero()[:, 1].view(-1, TOPK), case.replayed[:, 1].long())
    counts = chosen[case.rows.counted].sum(0)
    assert torch.equal(router.expert_counts, counts) and int(counts.sum()) == TOPK * int(case.rows.counted.sum())
    case.run()
    assert torch.equal(router.expert_counts, 2 * counts)
    finish_update([router], applied=False)
    assert torch.equal(router.expert_bias, bias) and torch.equal(router.expert_share, share)
    assert not router.expert_counts.any()
    case.run()
    finish_update([router], applied=True)
    expected = get_updated_expert_bias(counts.float(), bias, 0.1, torch.distributed.group.WORLD)
    assert torch.equal(router.expert_bias, expected) and not torch.equal(expected, bias)
    assert torch.equal(router.expert_share, (counts.double() / counts.sum()).float())
    assert not router.expert_counts.any()


@on_each_rank()
def test_a_minibatch_without_counted_tokens_changes_nothing(rank):
    case = Case(GLOBAL, lengths=[1, 1, 1], padding=1)
    share = case.router.expert_share.clone()
    hidden, weight = case.gradients()
    finish_update([case.router], applied=True)
    assert float(case.routing.losses["aux_loss"]) == 0 and not hidden.any() and not weight.any()
    assert torch.equal(case.router.expert_share, share)


@on_each_rank()
def test_an_update_without_minibatch_counts_is_an_error(rank):
    for flags in (Z, SEQ, GLOBAL, BIAS):
        check_passes(flags)


def check_passes(flags: str):
    case = Case(flags)
    uncounted = Routing("critic", (1, 2), EXPERTS, case.rows)
    with torch.no_grad():  # scoring in training mode, and the first forward of a layer that backward recomputes
        case.run(None)
        case.run(uncounted)
    case.router.eval()
    case.run(uncounted)
    case.router.train()
    assert not uncounted.losses
    assert "expert_counts" not in dict(case.router.named_buffers()) or not case.router.expert_counts.any()
    with pytest.raises(RuntimeError, match="critic trains without the counts of its mini-batch.* MoE layer 2$"):
        case.run(uncounted)
    with pytest.raises(RuntimeError, match="a model trains without the counts"):
        case.run(None)


@on_each_rank()
def test_a_router_without_balancing_needs_no_counts_and_keeps_none(rank):
    case = Case("--moe-router-load-balancing-type none")
    case.run(None)
    case.gradients()
    assert not case.routing.losses and not case.hidden.grad.any()
    assert {"expert_counts", "expert_share"}.isdisjoint(dict(case.router.named_buffers()))
