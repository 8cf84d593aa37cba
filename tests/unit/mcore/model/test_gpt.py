"""Models: packed equals alone, one rank equals two, values, and a forward during generation."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.models.tiny_models import SHAPES, VOCAB, build, farthest, gather_parameters, ragged_tokens
from tests.helpers.worlds import on_each_rank, run_world

LENGTHS = [5, 1, 9, 12, 2]
TEMPERATURE = 0.8
ROUNDING = 2e-5  # of float32 numbers of about 1, whose sums have other orders on other processors


def scores_of(rank, flags, shape):
    """Packed and one-by-one scores of a model, with all its parameters gathered."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, args, place = build(flags, shape)
    tokens, lengths = ragged_tokens(LENGTHS)
    with inference_mode(model):
        packed = token_scores(model, tokens, lengths, TEMPERATURE, VOCAB)[:2]
        alone = [token_scores(model, part, torch.tensor([len(part)]), TEMPERATURE, VOCAB)[:2]
                 for part in tokens.split(LENGTHS)]  # fmt: skip
    assert model.training
    alone = [torch.cat(column) for column in zip(*alone, strict=True)]
    return packed, alone, gather_parameters(model, place.pg_collection.tp, args.swiglu)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_equals_two_and_packed_equals_alone(shape):
    ((packed, alone, weights),) = run_world(scores_of, 1, "", shape)
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    for column, one_by_one in zip(packed, alone, strict=True):
        assert column.dtype == torch.float32 and column.shape == (sum(LENGTHS),)
        assert farthest(one_by_one, column) <= ROUNDING
        assert (column[starts] == 0).all() and (column != 0).sum() == sum(LENGTHS) - len(LENGTHS)
    others = run_world(scores_of, 2, "--tensor-model-parallel-size 2", shape)
    for scores, _, gathered in others:
        assert gathered.keys() == weights.keys()
        assert all(torch.equal(gathered[name], weight) for name, weight in weights.items())
        for column, expected in zip(scores, packed, strict=True):
            assert farthest(column, expected) <= ROUNDING
    for one, two in zip(others[0][0], others[1][0], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("shape", SHAPES)
@on_each_rank()
def test_scores_are_of_the_token_at_their_position_and_a_token_changes_only_later_ones(rank, shape):
    """token_scores against the log_softmax of the whole logits, from the decoder's output."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, _, _ = build("", shape)
    tokens, lengths = ragged_tokens([8])
    own = model.output_layer.weight
    head = model.embedding.word_embeddings.weight if own is None else own
    assert (own is None) == (shape != "gpt2")
    captured = {}
    model.decoder.register_forward_hook(lambda module, inputs, output: captured.update(hidden=output))
    with inference_mode(model):
        scores = token_scores(model, tokens, lengths, TEMPERATURE, VOCAB)
        logits = (captured["hidden"].squeeze(1) @ head.T)[:, :VOCAB].double() / TEMPERATURE
    logp = logits.log_softmax(-1)
    chosen = logp[torch.arange(7), tokens[1:]]
    entropy = -(logp.exp() * logp).sum(-1)[:7]
    assert farthest(scores.logprobs[1:], chosen) <= ROUNDING
    assert farthest(scores.entropy[1:], entropy) <= ROUNDING
    assert head.shape[0] == 32 and VOCAB == 20
    tokens, lengths = ragged_tokens([6, 7])
    with inference_mode(model):
        before = token_scores(model, tokens, lengths, 1.0, VOCAB).logprobs
        changed = tokens.clone()
        changed[9] = (tokens[9] + 1) % VOCAB  # the fourth token of the second sequence
        after = token_scores(model, changed, lengths, 1.0, VOCAB).logprobs
    assert torch.equal(before[:9], after[:9])
    assert (before[9:] != after[9:]).all()


def values_of(rank, flags):
    from megarl.mcore.model.forward_pass import inference_mode, token_values

    model, _, _ = build(flags, value_head=True)
    tokens, lengths = ragged_tokens(LENGTHS)
    parts = tokens.split(LENGTHS)
    with inference_mode(model):
        at_start = token_values(model, tokens, lengths)
        assert torch.equal(at_start, torch.zeros(sum(LENGTHS)))
        generator = torch.Generator().manual_seed(4)
        model.output_layer.weight.copy_(0.1 * torch.randn(1, 64, generator=generator))
        model.output_layer.bias.fill_(0.5)
        packed = token_values(model, tokens, lengths)
        alone = torch.cat([token_values(model, part, torch.tensor([len(part)])) for part in parts])
        other_last = tokens.clone()
        other_last[-1] = (tokens[-1] + 1) % VOCAB
        assert torch.equal(token_values(model, other_last, lengths)[-1], packed[-1])  # the state before the token
    assert farthest(packed, alone) <= ROUNDING
    return packed, [name for name, p in model.named_parameters() if VOCAB <= p.shape[0] <= 32]


def test_values_start_at_zero_and_are_of_the_state_before_the_token():
    ((packed, vocabulary),) = run_world(values_of, 1, "")
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    assert packed.dtype == torch.float32 and (packed[starts] == 0).all()
    assert (packed != 0).sum() == sum(LENGTHS) - len(LENGTHS)
    assert vocabulary == ["embedding.word_embeddings.weight"]  # the vocabulary's head is gone
    for values, _ in run_world(values_of, 2, "--tensor-model-parallel-size 2"):
        assert farthest(values, packed) <= ROUNDING


def forward_during_generation(rank):
    from megatron.core.inference.utils import InferenceMode

    from megarl.mcore.model.forward_pass import token_scores

    model, _, _ = build()
    tokens, lengths = ragged_tokens([3])
    InferenceMode.set_active()
    try:
        token_scores(model, tokens, lengths, 1.0, VOCAB)
    except RuntimeError as error:
        return str(error)
    return None


def test_a_forward_during_generation_is_rejected():
    (message,) = run_world(forward_during_generation, 1)
    assert "rollout engine is active" in message


def restored(rank):
    from megarl.mcore.model.forward_pass import inference_mode

    model, _, _ = build()
    try:
        with inference_mode(model):
            assert not model.training and not torch.is_grad_enabled()
            raise KeyError
    except KeyError:
        pass
    assert model.training and torch.is_grad_enabled()
    model.eval()
    with inference_mode(model):
        pass
    return model.training, dist.get_world_size()


def test_evaluating_leaves_the_mode_as_it_was():
    assert run_world(restored, 1) == [(False, 1)]
