"""Micro-batches through pipeline schedules."""

import torch

from megarl.mcore.model.forward_pass import inference_mode
from megarl.mcore.parallel import pipeline
from tests.helpers.models.gradient_accumulation import forward_and_loss, microbatches_of, wrapped_model
from tests.helpers.worlds import on_each_rank

SGD_LIKE = "--adam-eps 1 --lr 0.05 --clip-grad 0 --weight-decay 0.1"  # no division by tiny second moments


@on_each_rank()
def test_forward_only_returns_results_in_order_and_leaves_gradients_alone(rank):
    model, _, _, _, place = wrapped_model(SGD_LIKE)
    forward, loss = forward_and_loss(False)
    parts = microbatches_of(place, 3)
    with inference_mode(model):
        results = pipeline.run_microbatches([model], parts, forward, lambda out, part: (torch.zeros(()), out),
                                            place.pg_collection, False)  # fmt: skip
        expected = [forward(model, part) for part in parts]
    assert all(torch.equal(r.logprobs, e.logprobs) for r, e in zip(results, expected, strict=True))
    assert all(not p.main_grad.any() for p in model.parameters())
