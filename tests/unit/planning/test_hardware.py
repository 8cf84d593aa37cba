"""A cluster's speeds: links inside a node, the network between nodes, and what of a GPU's memory is planned."""

from types import SimpleNamespace

from megarl.planning import hardware
from megarl.planning.hardware import BANDWIDTH_SHARE, GIB, GPU, RESERVE, Cluster

CLUSTER = Cluster("test", GPU(80, 1e15, 2e12, 4e11), 0.5, 5e10, 8)


def test_groups_that_leave_a_node_use_the_network():
    assert CLUSTER.speed(8) == BANDWIDTH_SHARE * 4e11 and CLUSTER.speed(9) == BANDWIDTH_SHARE * 5e10
    assert CLUSTER.flops == 5e14 and "50% of 1000 TFLOPS" in CLUSTER.assumptions


def test_a_part_of_the_memory_stays_free():
    assert hardware.available(80) == int(80 * GIB * (1 - RESERVE))


def test_experts_spread_over_as_many_nodes_as_their_ranks_need():
    sizes = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1)

    def nodes(expert: int, tensor: int) -> int:
        args = SimpleNamespace(**sizes, expert_model_parallel_size=expert, expert_tensor_parallel_size=tensor)
        return hardware.expert_nodes(args, 8)

    assert [nodes(1, 4), nodes(8, 1), nodes(8, 2), nodes(12, 1)] == [1, 1, 2, 2]
