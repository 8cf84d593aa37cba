"""Which kernels a run computes with: those that a flag names, or the fastest that all ranks can use exactly."""

import contextlib

import pytest
import torch

from megarl import arguments
from megarl.errors import UsageError
from megarl.mcore import device, kernel_choice
from megarl.mcore.kernels import linear, native
from megarl.trainers import setup
from tests.helpers.worlds import run_world

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu --max-prompt-length 8"
    " --max-response-length 8"
)
SIZES = {(48, 32), (32, 48)}


def config_of(flags=""):
    return arguments.parse([*MODEL.split(), *flags.split()], 1, "rl")


@pytest.fixture(autouse=True)
def _as_before():
    yield
    kernel_choice.use(kernel_choice.available()[0])


def test_kernels_that_the_machine_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(kernel_choice, "available", lambda: ["onednn", "blas"])
    with pytest.raises(UsageError, match="--kernels compiled: not on this machine; allowed here: auto, onednn, blas"):
        setup.check_kernels(config_of("--kernels compiled"))
    setup.check_kernels(config_of("--kernels blas"))


CHOOSING = (
    "--multi-latent-attention --q-lora-rank 8 --qk-pos-emb-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-n-heads 2"
    " --dsa-indexer-head-dim 16"
)


@pytest.mark.parametrize("flags, is_built, words", [
    ("--fp16", True, "--fp16: allowed are fp32 and --bf16"),
    ("--kernels blas", True, "--kernels blas: allowed are auto, compiled"),
    ("", False, "needs compiled kernels: no compiled kernels; `python -m megarl build_kernels`"),
])  # fmt: skip
def test_a_choice_of_keys_needs_the_compiled_kernels(flags, is_built, words, monkeypatch):
    monkeypatch.setattr(native, "is_built", lambda: is_built)
    setup.check_kernels(config_of(flags))
    with pytest.raises(UsageError) as error:
        setup.check_kernels(config_of(f"{CHOOSING} {flags}"))
    assert str(error.value).startswith("actor: --dsa-indexer-topk 8 (sequences longer than that): ")
    assert words in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setattr(device, "has_cuda", lambda: True)  # which has its own, of other types than fp16
    with pytest.raises(UsageError, match=words) if "fp16" in flags else contextlib.nullcontext():
        setup.check_kernels(config_of(f"{CHOOSING} {flags}"))


def test_flags_know_the_same_names():
    assert all(config_of(f"--kernels {name}").settings.kernels == name for name in kernel_choice.KERNELS)


def test_what_is_chosen_computes_and_is_named(capsys):
    weight, x = torch.randn(48, 32), torch.randn(9, 32)
    blas = torch.nn.functional.linear(x, weight)
    for name in kernel_choice.available():
        setup.choose_kernels(config_of(f"--kernels {name}"), 0)
        assert capsys.readouterr().out.startswith(f"megarl: kernels: {name}")
        assert native.is_used() == (name == kernel_choice.COMPILED)
        torch.testing.assert_close(linear.matmul(x, weight), blas)
    assert torch.equal(linear.matmul(x, weight), blas)  # the last one
    setup.choose_kernels(config_of(), 1)
    assert not capsys.readouterr().out and native.is_used() == native.is_built()


def kernels_of_rank(rank, lacking):
    """The kernels that a rank chooses if the second rank lacks some."""
    kernel_choice.available = lambda: [name for name in kernel_choice.KERNELS if rank != 1 or name not in lacking]
    return kernel_choice.choose(kernel_choice.AUTO, SIZES)


@pytest.mark.parametrize(("lacking", "wanted"), [((), "compiled"), (("compiled",), "onednn"),
                                                 (("compiled", "onednn"), "blas")])  # fmt: skip
def test_all_ranks_take_kernels_that_each_has(lacking, wanted, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_has_independent_rows", lambda *size: True)
    assert run_world(kernels_of_rank, 2, lacking) == [wanted] * 2


def test_onednn_is_left_out_if_its_rows_depend_on_each_other(monkeypatch):
    monkeypatch.setattr(kernel_choice, "available", lambda: [kernel_choice.ONEDNN, kernel_choice.BLAS])
    probed = []
    monkeypatch.setattr(kernel_choice, "_has_independent_rows", lambda *size: probed.append(size) or size != (32, 48))
    assert kernel_choice.choose(kernel_choice.AUTO, SIZES) == kernel_choice.BLAS and (32, 48) in probed
    assert kernel_choice.choose(kernel_choice.AUTO, {(48, 32)}) == kernel_choice.ONEDNN
    assert kernel_choice.choose(kernel_choice.ONEDNN, SIZES) == kernel_choice.ONEDNN  # by name nothing is probed
    probed.clear()
    monkeypatch.setattr(kernel_choice, "available", lambda: list(kernel_choice.KERNELS))
    assert kernel_choice.choose(kernel_choice.AUTO, SIZES) == kernel_choice.COMPILED and not probed


@pytest.mark.parametrize(("columns", "inner"), [*SIZES, (7, 5), (130, 300), (2048, 768)])
def test_rows_of_the_compiled_kernels_do_not_depend_on_each_other(columns, inner):
    weight, x = torch.randn(columns, inner), torch.randn(67, inner)
    assert kernel_choice.has_independent_rows(lambda x: linear.matmul(x, weight), x) or not native.is_built()
    assert not kernel_choice.has_independent_rows(lambda x: linear.matmul(x, weight) + 1e-3 * len(x), x)


def test_probed_sizes_are_those_of_one_rank():
    args = config_of().roles["actor"].megatron
    head = kernel_choice.MAX_COLUMNS, 64
    assert kernel_choice.product_sizes(args) == {(192, 64), (64, 64), (256, 64), (64, 128), head}
    args.tensor_model_parallel_size = 2
    assert (96, 64) in kernel_choice.product_sizes(args)
