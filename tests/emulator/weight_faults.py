"""Faults of the weight sync of a rollout that generates ahead, planted in train_rl."""

from unittest import mock

import torch
import torch.distributed as dist

from tests.helpers import forked_programs
from tests.helpers.rollout import seeded_clock


def run(name: str, argv: list[str], variables: dict[str, str]):
    """Runs train_rl on this rank with one of FAULTS. A seed says when a recorded schedule finds weights in a round."""
    from megarl.mcore.weights.reshard import WeightTransfer

    seeded_clock.install(int(variables["RANK"]), 1)
    FAULTS[name](WeightTransfer)
    forked_programs.run_here("rl", argv, variables)


def none(transfer):
    """No fault."""


def taken_while_a_graph_runs(transfer):
    """No fault: a decode step still runs as the weights come, and NCCL waits for its stream."""
    _received_with_a_graph(transfer, torch.cuda.current_stream)


def received_on_a_stream_of_its_own(transfer):
    """The same, but NCCL waits for another stream than that of the step."""
    _received_with_a_graph(transfer, torch.cuda.Stream)


def _received_with_a_graph(transfer, stream):
    from megarl.mcore.inference.device_decode import StepGraphs

    run, receive, last = StepGraphs.run, transfer.run, []

    def remembered(graphs, key, function):
        outputs = run(graphs, key, function)
        last[:] = [graphs._graphs[key].graph] if graphs.is_captured(key) else []
        return outputs

    def received(self):
        if not last:
            return receive(self)
        last[0].replay()
        taken = stream()
        with torch.cuda.stream(taken):
            sent = receive(self)
        torch.cuda.current_stream().wait_stream(taken)
        return sent

    StepGraphs.run, transfer.run = remembered, received


def read_before_they_are_there(transfer):
    """The rollout does not wait for what it receives."""
    receive, start, kept = transfer.run, dist.batch_isend_irecv, []

    def started(operations):
        kept.extend(start(operations))
        return ()

    def received(self):
        with mock.patch.object(dist, "batch_isend_irecv", started):
            return receive(self)

    transfer.run = received


def one_slot_for_all_steps(transfer):
    """The actor copies into the memory of the step before, which may be on its way."""
    send, empty, slots = transfer.send_copy, torch.empty, []

    def sent(self):
        kept = iter([*slots])

        def slot(*args, **kwargs):
            if (found := next(kept, None)) is None:
                slots.append(found := empty(*args, **kwargs))
            return found

        with mock.patch.object(torch, "empty", slot):
            return send(self)

    transfer.send_copy = sent


def sent_from_the_module(transfer):
    """The actor sends its parameters themselves, which the next update changes."""
    from megarl.mcore.weights import reshard

    send, start, reshard.LARGE_BYTES = transfer.send_copy, dist.batch_isend_irecv, 0

    def sent(self):
        boxes = [self._source_view(message.copies[0]) for each in self.rounds for message in each.sends]

        def started(operations):
            for operation, box in zip(operations, boxes, strict=True):
                operation.tensor = box.reshape(-1)
            return start(operations)

        with mock.patch.object(dist, "batch_isend_irecv", started):
            return send(self)

    transfer.send_copy = sent


FAULTS = {
    fault.__name__: fault
    for fault in (
        none, taken_while_a_graph_runs, received_on_a_stream_of_its_own, read_before_they_are_there,
        one_slot_for_all_steps, sent_from_the_module,
    )
}  # fmt: skip
