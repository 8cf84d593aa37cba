#!/usr/bin/env python3
"""Shows what a checkpoint holds, checks it, and compares it with another: no GPU, no ranks, one tensor at a time.

    python tools/inspect_checkpoint.py runs/mine                         the latest checkpoint of a run
    python tools/inspect_checkpoint.py runs/mine/checkpoints/best --verify
    python tools/inspect_checkpoint.py runs/mine/checkpoints/step_00000100 --diff runs/mine/checkpoints/step_00000200
    python tools/inspect_checkpoint.py models/smollm2                    a Hugging Face folder, or a PEFT adapter

Tensors whose names differ in numbers alone share a line: `decoder.layers.{0-3}.mlp.linear_fc1.weight`. `--verify` reads
every file: SHA-256 of a checkpoint's files, and whether all weights are finite. Exit status: 0; 1 if `--verify` finds
damage or `--diff` a difference; 2 for wrong input.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megarl.checkpoint import folders  # noqa: E402
from megarl.checkpoint import manifest as manifests  # noqa: E402
from megarl.errors import ArgumentParser, UsageError  # noqa: E402
from megarl.observe.files import json_line  # noqa: E402
from megarl.observe.terminal import format_bytes, printable, table  # noqa: E402
from tools._tensor_sources import (  # noqa: E402
    CheckpointTensors,
    TensorSource,
    difference,
    groups,
    is_safetensors_folder,
    open_safetensors,
)

FLAG = "DIR"  # names the argument in messages
OPTIMIZER = "optimizer."
SHOWN_NAMES = 5  # of tensors that only one side has, or that are not finite


class Contents:
    """A checkpoint or folder: its manifest, if it has one, and its tensors by role."""

    def __init__(self, path: str, flag: str):
        """Finds and reads the metadata. UsageError for anything else, and for damage that needs no reading of data."""
        self.manifest: dict = {}
        self.sources: dict[Path, TensorSource] = {}  # folders of weights that no step changes come after the others
        if Path(path).is_dir() and is_safetensors_folder(Path(path)):
            self.folder, self.kind = Path(path), "folder"
            self.sources[self.folder] = open_safetensors(self.folder, flag)
        else:
            self.folder, self.kind = folders.find(path, flag), "checkpoint"
            self.manifest = folders.read_manifest(self.folder, flag)
            self.sources[self.folder] = CheckpointTensors(self.folder, printable(f"{flag} {self.folder}"))
            for role in self.manifest.get(folders.FROZEN, {}):
                frozen = folders.frozen_folder(self.folder, self.manifest, role, flag)
                folders.check(frozen, flag)
                self.sources[frozen] = CheckpointTensors(frozen, printable(f"{flag} {frozen}"))
        self.of = {name: source for source in self.sources.values() for name in source.parts}

    def parts(self) -> dict:
        """All tensors by name."""
        return {name: source.parts[name] for name, source in self.of.items()}

    def roles(self) -> dict[str, dict]:
        """Weights and optimizer state by role; of a folder all under the name `weights`."""
        found: dict[str, dict] = {}
        for name, part in self.parts().items():
            role, rest = name.split(".", 1) if self.kind == "checkpoint" and "." in name else ("weights", name)
            kind = "optimizer" if rest.startswith(OPTIMIZER) else "weights"
            found.setdefault(role, {"weights": {}, "optimizer": {}})[kind][rest] = part
        return found


def describe(contents: Contents) -> dict:
    """Everything that is printed about one folder, as plain data."""
    m = contents.manifest
    found: dict = {"folder": str(contents.folder), "kind": contents.kind}
    if contents.kind == "checkpoint":
        names = ("step", "program", "world_size", "seed", "vocab_size", "prompt_order", "best", "kept_for", "layout",
                 "data", "versions", "lora", "frozen", "steps_skipped")  # fmt: skip
        found |= {name: m[name] for name in names if name in m}
        pointers = (folders.LATEST, folders.BEST)
        found["named_by"] = [p for p in pointers if folders.named(contents.folder.parent, p) == contents.folder]
        settings = json.dumps(m.get("settings", {}), sort_keys=True)
        found["settings_sha256"] = hashlib.sha256(settings.encode()).hexdigest()
        found["files"] = {"count": len(m["files"]), "bytes": sum(file["size"] for file in m["files"].values())}
    elif (contents.folder / "adapter_config.json").exists():
        found["kind"] = "PEFT adapter"
    else:
        found["kind"] = "Hugging Face folder"
    found["roles"] = {role: _describe_role(kinds) for role, kinds in contents.roles().items()}
    return found


def _describe_role(kinds: dict) -> dict:
    sizes = {kind: {"tensors": len(parts), "elements": sum(part.numel for part in parts.values()),
                    "bytes": sum(part.bytes for part in parts.values())} for kind, parts in kinds.items()}  # fmt: skip
    lines = []
    for pattern, names in groups(kinds["weights"]).items():
        part = kinds["weights"][names[0]]
        lines.append({"name": pattern.strip(), "tensors": len(names), "dtype": part.dtype, "shape": list(part.shape),
                      "elements": len(names) * part.numel})  # fmt: skip
    return {**sizes, "groups": lines}


def verify(contents: Contents) -> list[str]:
    """What is wrong with the content, a line each; reads every file once, and the weights a second time."""
    problems = []
    if contents.kind == "checkpoint":
        for folder in contents.sources:
            entries = folders.read_manifest(folder, FLAG)["files"]
            found = (manifests.check_content(folder, name, entry) for name, entry in sorted(entries.items()))
            problems += [printable(f"{folder.name}: {problem}") for problem in found if problem]
        if problems:
            return problems  # damaged data would give more lines about the same
    for name, source in contents.of.items():
        values = source.read(name)
        if values.is_floating_point() and not torch.isfinite(values.float()).all():
            problems.append(printable(f"{name}: holds numbers that are not finite"))
    return problems


def compare(one: Contents, other: Contents) -> dict:
    """How the tensors of two folders differ: rows by pattern, and the names that only one has, or of other shapes."""
    parts, theirs = one.parts(), other.parts()
    common = {name: part for name, part in parts.items() if name in theirs and theirs[name].shape == part.shape}
    rows = []
    for pattern, names in groups(common).items():
        results = [difference(one.of[name].read(name), other.of[name].read(name)) for name in names]
        rows.append({
            "name": pattern.strip(), "tensors": len(names), "equal": sum(result.is_equal for result in results),
            "max_abs": max(result.largest for result in results),
            "max_rel": max(result.relative for result in results),
        })  # fmt: skip
    return {
        "other": str(other.folder), "groups": rows, "only_here": sorted(parts.keys() - theirs.keys()),
        "only_there": sorted(theirs.keys() - parts.keys()),
        "other_shape": sorted(name for name in parts if name in theirs and name not in common),
    }  # fmt: skip


def differs(found: dict) -> bool:
    """Whether `compare` found any difference."""
    unequal = any(row["equal"] < row["tensors"] for row in found["groups"])
    return unequal or bool(found["only_here"] or found["only_there"] or found["other_shape"])


def report(found: dict) -> list[str]:
    """The lines of text about one folder."""
    lines = [printable(f"{found['folder']}: {found['kind']}")]
    if found["kind"] == "checkpoint":
        lines += _manifest_lines(found)
    rows = [["role", "parameters", "tensors", "bytes", "optimizer state"]]
    for role, sizes in found["roles"].items():
        weights, state = sizes["weights"], sizes["optimizer"]
        kept = f"{format_bytes(state['bytes'])} in {state['tensors']} tensors" if state["tensors"] else "none"
        cells = [f"{weights['elements']:,}", str(weights["tensors"]), format_bytes(weights["bytes"])]
        rows.append([printable(role), *cells, kept])
    lines += ["", *table(rows, right=4)]
    for role, sizes in found["roles"].items():
        rows = []
        for group in sizes["groups"]:
            times = f"{group['tensors']} ×" if group["tensors"] > 1 else ""
            shape = f"[{', '.join(map(str, group['shape']))}]"
            rows.append([f"  {printable(group['name'])}", times, group["dtype"], shape, f"{group['elements']:,}"])
        lines += ["", printable(role), *(table(rows, right=1) if rows else ["  no weights"])]
    return lines


def _manifest_lines(found: dict) -> list[str]:
    kept, named = found.get("kept_for", "interval"), ", ".join(found["named_by"]) or "nothing"
    versions = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items() if version)
    facts = [["program", f"{found['program']}, step {found['step']}, {found['world_size']} ranks, {versions}"],
             ["kept for", f"{kept}; named by: {named}"],
             ["files", f"{found['files']['count']} files, {format_bytes(found['files']['bytes'])}"]]  # fmt: skip
    if best := found.get("best"):
        facts.append(["best evaluation", ", ".join(f"{name} {value}" for name, value in sorted(best.items()))])
    if order := found.get("prompt_order"):
        facts.append(["prompt order", ", ".join(f"{name} {value}" for name, value in sorted(order.items()))])
    facts.append(["settings", f"seed {found.get('seed')}, SHA-256 {found['settings_sha256'][:16]}"])
    for name, entry in found.get("data", {}).items():
        facts.append([name.replace("_", " "), f"{entry['value']}, SHA-256 {entry['sha256'][:16]}"])
    for role, sizes in found.get("layout", {}).items():
        split = [f"{name} {size}" for name, size in sizes.items() if name != "ranks" and size != 1]
        facts.append([f"layout of {role}", f"ranks {sizes['ranks']}" + "".join(f", {part}" for part in split)])
    for role, entry in found.get("lora", {}).items():
        factors = ", ".join(f"{name} {value}" for name, value in entry["factors"].items())
        facts.append([f"factors of {role}", factors])
    return table([[f"  {printable(name)}", printable(text)] for name, text in facts])


def diff_report(found: dict) -> list[str]:
    """The lines of text about a comparison."""
    rows = [["tensors", "equal", "largest difference", "relative"]]
    for row in found["groups"]:
        equal = f"{row['equal']} of {row['tensors']}"
        rows.append([printable(row["name"]), equal, f"{row['max_abs']:.3g}", f"{row['max_rel']:.3g}"])
    lines = ["", printable(f"compared with {found['other']}:"), *table(rows, right=3)]
    for key, text in (("only_here", "only here"), ("only_there", "only there"), ("other_shape", "of another shape")):
        names = found[key]
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            lines.append(printable(f"{text}: {', '.join(names[:SHOWN_NAMES])}{more}"))
    return lines


def open_other(path: str, one: Contents) -> Contents:
    """What `--diff` names. UsageError unless it is of the same kind."""
    other = Contents(path, "--diff")
    if other.kind != one.kind:
        raise UsageError(
            printable(f"--diff {path}: a {other.kind}, which has other names than a {one.kind}; ")
            + "tools/convert.py verify compares a checkpoint with a Hugging Face folder"
        )
    return other


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", metavar=FLAG, help="run, checkpoint, Hugging Face folder or PEFT adapter")
    parser.add_argument("--verify", action="store_true", help="read everything: checksums, finite weights")
    parser.add_argument("--diff", metavar="OTHER", help="compare all tensors with those of another folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        options = parser.parse_args(argv)
        contents = Contents(options.folder, FLAG)
        other = open_other(options.diff, contents) if options.diff else None
        found = describe(contents)
        if options.verify:
            found["problems"] = verify(contents)
        if other:
            found["diff"] = compare(contents, other)
    except UsageError as error:
        print(f"inspect_checkpoint: {printable(error)}", file=sys.stderr)
        return 2
    if options.json:
        print(json_line(found))
    else:
        checked = found.get("problems")
        lines = report(found) + (diff_report(found["diff"]) if other else [])
        if checked is not None:
            lines += ["", *(f"damaged: {problem}" for problem in checked)] if checked else ["", "verified: no damage"]
        print("\n".join(lines))
    return int(bool(found.get("problems")) or bool(other) and differs(found["diff"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
