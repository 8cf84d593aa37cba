"""Parses what a shell block of the documentation calls, with each program's own parser, and starts nothing."""

import argparse
import contextlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest
import torch.distributed.run

from megarl import arguments, generate, launcher, plan
from megarl.rewards.chosen_verifiers import build_verifiers
from tests.helpers.pages import commands, documents
from tests.helpers.pages.command_flags import PROGRAMS, WrongCommand, check_tool, require
from tests.helpers.programs import ROOT
from tests.helpers.tools import load_tool

GAP = "…"  # words that the reader adds
OTHER_PROGRAMS = ("lm_eval", "git", "docker")  # not ours, and not installed


def filled(flags: list[str]) -> list[str]:
    """The flags with files for a gap, and all files of --config together."""
    if GAP in flags:
        files = ["--prompts", "my/train.jsonl"] if "--hf-model" in flags else ["--config", "my_run.yaml"]
        flags = [*files, *flags]
    configs, others, is_config = [], [], False
    for word in flags:
        is_config = word == "--config" or is_config and not word.startswith("--")
        if word not in ("--config", GAP):
            (configs if is_config else others).append(word)
    return ["--config", *configs, *others] if configs else others


def parse_program(module: str, flags: list[str], size: int, per_node: int):
    """Parses the flags of a program as it does, and imports its rewards; a typed flag without effect is wrong."""
    if module.removeprefix("megarl.") == "generate":  # the flags of the run, after its own
        module, flags = "train_rl", generate.read_flags(flags)[1]
    config = arguments.parse(filled(flags), size, PROGRAMS[module.removeprefix("megarl.")], per_node)
    for warning in config.warnings:
        idle = re.findall(r"--[\w-]+", re.sub(r"\([^)]*\)", "", warning))
        if not warning.startswith("without effect: ") or set(idle) & set(flags):
            raise WrongCommand(f"warning: {warning}")
    if ":" in config.settings.reward:
        build_verifiers(config.settings)


def parse_torchrun(words: list[str]):
    words = words[1:] if words[0] == GAP else words
    options = torch.distributed.run.get_args_parser().parse_args(words)
    require(options.nproc_per_node.isdigit(), f"--nproc-per-node {options.nproc_per_node}")
    if options.module:
        ranks = int(options.nproc_per_node)
        parse_program(options.training_script, options.training_script_args, ranks, ranks)
    else:
        parse_tool(Path(options.training_script), options.training_script_args)


class Parsed(Exception):
    """A tool has parsed its arguments."""


def parse_tool(path: Path, words: list[str]):
    """Runs a tool until its own parser has read the words."""
    require((ROOT / path).is_file(), f"no file {path}")
    text = (ROOT / path).read_text()
    if "launch(" in text:  # its flags are those of a program, which ends this process for a wrong one
        check_tool(ROOT / path, words, False)
        return

    def parse(self, *args, **kwargs):
        raise Parsed(real(self, *args, **kwargs))

    real = argparse.ArgumentParser.parse_known_args
    main = load_tool(path.with_suffix("").as_posix().removeprefix("tools/")).main
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [str(path), *words])
        try:
            main(*[words][: len(inspect.signature(main).parameters)])
        except Parsed as parsed:
            rest = [word for word in parsed.args[0][1] if word.startswith("--")]
            require(not rest or "parse_known_args" in text, f"{path} has no flags {rest}")
            return
        except SystemExit:
            pass
    raise WrongCommand(said.getvalue())


def check_call(words: tuple[str, ...]):
    """UsageError or WrongCommand for a program that would not take these arguments."""
    name, rest = words[0], list(words[1:])
    is_python = re.fullmatch(r"(\S+/)?python3?(\.12)?", name)
    if is_python and rest[:2] == ["-m", "megarl"]:
        is_python, name, rest = None, "megarl", rest[2:]
    is_launched = is_python and rest[:2] == ["-m", "megarl.launcher"] or name == "megarl" and set(rest) & {*PROGRAMS}
    module = rest[1].removeprefix("megarl.") if is_python and rest[:1] == ["-m"] else ""
    if is_launched:
        options = launcher._parser().parse_args(rest[2:] if is_python else rest)
        ranks = options.nproc_per_node or 1
        parse_program(options.program, options.flags, ranks * options.nnodes, ranks)
    elif module == "plan" and "--least-recompute" not in rest:
        plan.main(filled(rest[2:]))
    elif module in (*PROGRAMS, "generate"):
        parse_program(module, rest[2:], 1, 1)
    elif name == "torchrun":
        parse_torchrun(rest)
    elif is_python and rest[0].startswith("tools/"):
        parse_tool(Path(rest[0]), rest[1:])
    elif name not in OTHER_PROGRAMS and module != "plan":
        script = ("bash",) if name.endswith(".sh") else ()
        commands.check(documents.Command("", (*script, name, *rest), {}, False))
