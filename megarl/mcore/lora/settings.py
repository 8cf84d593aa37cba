"""Rank, scale and targets of a role's factors, and the names of targets."""

import dataclasses
import math
from typing import Any

ALL_LINEAR = "all-linear"
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # of multi-latent attention
IN_PROJ_TARGETS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
RECURRENT_TARGETS = (*IN_PROJ_TARGETS, "in_proj", "out_proj")  # of gated delta nets, of Mamba-2, of both
TARGETS = ATTENTION_TARGETS + MLP_TARGETS + LATENT_TARGETS + RECURRENT_TARGETS


@dataclasses.dataclass(frozen=True)
class LoRASettings:
    """The factors of a role: W + s·B·A for every weight W that the targets name."""

    rank: int  # r: A is [r, K] and B [N, r] for W [N, K]
    alpha: float
    rslora: bool
    targets: tuple[str, ...]  # of TARGETS, in that order

    @property
    def scale(self) -> float:
        """s = α/r, or α/√r with rank stabilization (2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def with_rank(self, rank: int) -> "LoRASettings":
        """The same scale with another rank."""
        return dataclasses.replace(self, rank=rank, alpha=self.scale * (math.sqrt(rank) if self.rslora else rank))

    def values(self) -> dict[str, Any]:
        """The values as flags give them, by flag; what a checkpoint must agree on."""
        numbers: dict[str, Any] = {"--lora-rank": self.rank, "--lora-alpha": self.alpha, "--lora-rslora": self.rslora}
        return numbers | {"--lora-targets": ",".join(self.targets)}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "LoRASettings":
        """The inverse of `values`."""
        targets = tuple(values["--lora-targets"].split(","))
        return cls(values["--lora-rank"], values["--lora-alpha"], values["--lora-rslora"], targets)


def parse_targets(text: str) -> tuple[str, ...]:
    """`"q_proj,v_proj"` or `"all-linear"` -> targets in the order of `TARGETS`. ValueError for an unknown name."""
    names = set(TARGETS) if text == ALL_LINEAR else {name.strip() for name in text.split(",")}
    if unknown := sorted(names - set(TARGETS)):
        raise ValueError(f"{unknown[0]!r} is no target")
    return tuple(name for name in TARGETS if name in names)
