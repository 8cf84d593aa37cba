"""Metrics of a step's episodes: whatever environments call their parts, a run gets no columns without end."""

from types import SimpleNamespace

from megarl.measurements import NamesOfRun
from megarl.rollout.statistics import EpisodeStatistics, metrics_of


def test_a_run_keeps_its_first_names(capsys):
    replica = SimpleNamespace(dp_all_reduce=lambda total: total, gather_replicas=lambda parts: [parts], dp_rank=0)
    known = NamesOfRun()

    def metrics(first: int, count: int) -> list[str]:
        statistics = EpisodeStatistics()
        statistics.counts["episodes"] = 2.0
        statistics.parts |= {f"n{i:03}": 1.0 for i in range(first, first + count)}
        found = metrics_of(statistics, replica, known)
        return [name.removeprefix("environment/reward/n") for name in found if "/reward/" in name]

    assert metrics(50, 60) == [f"{i:03}" for i in range(50, 110)] and capsys.readouterr().err == ""
    assert metrics(0, 60) == [f"{i:03}" for i in [*range(4), *range(50, 60)]]
    assert capsys.readouterr().err == (
        "megarl: warning: environments have given more than 64 names of parts; metrics have the first 64, without "
        "'n004' and others\n"
    )
    assert len(metrics(0, 60)) == 14 and capsys.readouterr().err == ""
