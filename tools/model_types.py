"""Writes docs/model_types.md: which causal language model types of the installed transformers megarl runs.

    python tools/model_types.py            # writes the page; about ten minutes on one core
    python tools/model_types.py --check    # exit status 1 if the page is not what this program would write

Each type is tried on a small model with random weights, as a folder of the type is tried before a run: its class is
built, its attention is found, and its self-check runs.
"""

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megarl.data.images.processor import KINDS  # noqa: E402  the checkout's own code
from megarl.errors import UsageError, one_line  # noqa: E402
from megarl.mcore.any_model import self_check, source  # noqa: E402
from megarl.mcore.any_model.attention import Slot, Unsupported  # noqa: E402
from megarl.mcore.any_model.tower import FAMILIES  # noqa: E402
from megarl.mcore.weights.hf.families import families  # noqa: E402
from tests.helpers.folders import any_types  # noqa: E402

PAGE = ROOT / "docs" / "model_types.md"
HEAD = """<!-- Made by tools/model_types.py; do not edit. -->

# Types of transformers

What [`--model-source transformers`](huggingface.md#any-type-of-transformers) does with each of the {all} types of
causal language models of transformers {version}. Each is tried on a small model that switches on what published folders
have. {runs} run; {refused} are refused with the line below; {others} are not judged.

**mapped**: without the flag, Megarl's own layers compute a folder of this type. An encoder counts as a decoder here, as
transformers' `is_decoder` makes it one.
"""
IMAGES = """## With images

What becomes of [images in prompts](images.md) with each of the {all} types of transformers that read images and text.
{runs} run, compared with transformers' own forward. The others read text alone if they run at all; their reason is the
first that the type's class shows.
"""
LONGEST = 128  # tokens: more than the windows of small models
CACHES = "caches of several shapes"


class Found(NamedTuple):
    """What became of a type."""

    kind: str
    status: str  # runs, refused or not judged
    text: str  # what its attention has, or the reason


def judge(kind: str) -> Found:
    """Tries a type."""
    try:
        config = any_types.small_config(kind)
    except Exception as error:  # whatever the type's class raises
        return Found(kind, "not judged", one_line(f"no small configuration: {type(error).__name__}: {error}")[:200])
    try:
        found = source.of_config(config)
        module = found.module(torch.float32)
        slots = source.find_slots(module)
        self_check.check(found, LONGEST)
        source.flags_of(found, slots, UsageError)
    except (Unsupported, UsageError) as error:
        if "ImportError" in str(error):
            return Found(kind, "not judged", one_line(str(error)))
        return Found(kind, "refused", re.sub(r" \(off by [^)]*\)", "", one_line(str(error))))  # differs by processor
    return Found(kind, "runs", ", ".join(features(module, slots)))


def features(module: Any, slots: tuple[Slot, ...]) -> list[str]:
    """What a module's attention and experts have beside keys and values of one shape."""
    windows = {slot.window for slot in slots}
    has = {
        "recurrent states": bool(module.state_shapes),
        "windows" if None in windows else "windows alone": bool(windows - {None}),
        CACHES: len({(slot.groups, slot.channels) for slot in slots}) > 1,
        "values narrower than keys": any(slot.key_channels != slot.value_channels for slot in slots),
        "sinks or a softcap": any(slot.has_score_options for slot in slots),
        "several calls a module": any(len(getattr(each, "attention_slots", ())) > 1 for each in module.modules()),
        "experts": any(hasattr(each, "num_experts") and hasattr(each, "has_gate") for each in module.modules()),
        "a bias of the head": getattr(module.get_output_embeddings(), "bias", None) is not None,
        "buffers": any(
            name not in dict(module.named_parameters(remove_duplicate=False)) for name in module.state_dict()
        ),
    }
    return [name for name, is_there in has.items() if is_there]


def judge_images(kind: str, running: set[str]) -> Found:
    """Says of a type whether prompts may have images. `running`: text types that run."""
    if kind in FAMILIES:
        layers = "Megatron's layers", "transformers"
        return Found(kind, "runs", " and ".join(layers[:1] if FAMILIES[kind] else layers[kind not in families() :]))
    return Found(kind, "refused", _problem_of_images(kind, running))


def _problem_of_images(kind: str, running: set[str]) -> str:
    """Why a type whose images do not run is refused: the first reason that holds."""
    config = CONFIG_MAPPING[kind]
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config]
    model = found[0] if isinstance(found, tuple) else found
    code = inspect.getsource(sys.modules[model.__module__])
    processor = (IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}).get("pil")
    try:
        text = config().get_text_config().model_type
    except Exception:  # whatever a class raises that has no defaults
        text = kind
    problems = {
        f"{model.__name__} has no get_image_features: its tower does not stand apart": "def get_image_features" in code,
        "its images attend within themselves": "token_type_ids" not in inspect.signature(model.forward).parameters,
        "its rows have three positions, and Megarl's layers do not map it": "def get_rope_index" not in code,
        "its layers add features of images, and Megarl's layers do not map it": "deepstack" not in code,
        "transformers has no image processor with Pillow for it": processor is not None,
        f"{processor}: megarl does not know the tokens of its images": str(processor).removesuffix("Pil") in KINDS,
        f"its language model, {text}, does not run": text in running,
    }
    return next((text for text, holds in problems.items() if not holds), "not compared with transformers' own forward")


def image_part(running: set[str]) -> str:
    """The part of the page about types that read images."""
    every = [judge_images(kind, running) for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)]
    runs, refused = ([each for each in every if each.status == status] for status in ("runs", "refused"))
    parts = [IMAGES.format(all=len(every), runs=len(runs)).rstrip("\n")]
    for columns, rows in ((("type", "language model on"), runs), (("type", "why images are refused"), refused)):
        parts.append(table(columns, [(f"`{each.kind}`", each.text) for each in rows]))
    return "\n\n".join(parts)


def page(every: list[Found]) -> str:
    """The page of what became of all types."""
    by_status = {
        status: [each for each in every if each.status == status] for status in ("runs", "refused", "not judged")
    }
    runs, refused, others = by_status.values()
    counts = dict(all=len(every), runs=len(runs), refused=len(refused), others=len(others))
    parts = [HEAD.format(version=transformers.__version__, **counts).rstrip("\n")]
    parts += ["## Run", table(("type", "mapped", "its small model has"), [
        (f"`{each.kind}`", "yes" if each.kind in families() else "", each.text) for each in runs
    ])]  # fmt: skip
    for title, rows in (("Refused", refused), ("Not judged", others)):
        parts += [f"## {title}", table(("type", "reason"), [(f"`{each.kind}`", _escaped(each.text)) for each in rows])]
    parts.append(image_part({each.kind for each in runs}))
    return "\n\n".join(parts) + "\n"


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")


def main(argv: list[str]) -> int:
    """Writes or compares the page; the exit status."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    arguments.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    check = arguments.parse_args(argv).check
    torch.set_num_threads(1)
    text = page([judge(kind) for kind in any_types.types()])
    if check:
        if PAGE.read_text(encoding="utf-8") != text:
            print("model_types: docs/model_types.md is stale; run python tools/model_types.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
