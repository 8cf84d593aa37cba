"""Which operators of PyTorch run."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorNames(TorchDispatchMode):
    """Notes the names of the operators that run inside, as `aten.mm.default`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def packets(self) -> set[str]:
        """The names without their overloads, as `aten.mm`."""
        return {name.rpartition(".")[0] for name in self.names}
