"""What a program understood of its flags and files, for `--check`: a line for each role and each set of prompts."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megarl.arguments import RoleSettings, RunConfig
from megarl.comm.announcements import judges_early
from megarl.data.conversations import Encoder
from megarl.data.images.book import Images
from megarl.data.images.names import row_of
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.flags.settings import expected_responses, group_sizes
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.observe.files import step_name
from megarl.observe.terminal import printable
from megarl.planning.parameters import frozen_total, parameter_totals
from megarl.planning.plan_table import count, span
from megarl.trainers.events import RunEvents, events_of
from megarl.trainers.prompt_inputs import notes_of

_SHOWN = 300  # characters of a text
_LISTED = 8  # steps


def summary(config: RunConfig, inputs: Any) -> list[str]:
    """Lines of text about a program's checked inputs.

    `inputs`: with `encoder`; if there are any, with `prompt_sets` and `first_example`, the sequences of an example
    by name: (tokens, whether the token counts in the loss).
    """
    world = max(role.ranks.stop for role in config.roles.values())
    tokenizer = inputs.encoder.tokenizer
    rows = [*_roles(config, tokenizer.vocab_size), ("tokenizer", _tokenizer(config, inputs.encoder))]
    sets: dict[str, PromptSet] = getattr(inputs, "prompt_sets", {})
    rows += [(found.flag.removeprefix("--"), f"{len(found):,} from {found.path}") for found in sets.values()]
    rows += [("", note) for note in notes_of(sets)]
    rows += _first(inputs, sets, tokenizer)
    factory = getattr(inputs, "reward_factory", None)
    if factory is not None and factory.judge_prompts is not None:
        tokens = factory.judge_prompts.example(next(iter(sets.values()))[0])
        read = text_with_special(factory.encoder.tokenizer, tokens, factory.encoder.images)
        rows.append(("judge reads", _shown(tokens, read)))
    if config.trained or config.settings.debug_rollout_only:
        rows += _training(config, getattr(inputs, "manifest", {}).get("step", 0))
    width = max(len(name) for name, _ in rows)
    return [
        f"megarl: all input is valid for {world} rank{'s' * (world > 1)}",
        *(f"  {name:{width}}  {printable(text)}" for name, text in rows),
    ]


def _roles(config: RunConfig, tokens: int) -> list[tuple[str, str]]:
    rows = []
    for name, role in config.roles.items():
        facts = [f"rank{'s' * (len(role.ranks) > 1)} {span(role.ranks)}"]
        if role.model_role != name:
            facts.append(f"the {role.model_role}'s model")
        elif name == "teacher" and config.teachers.names:
            count_of = len(config.teachers.models)
            facts += [_layout(role), f"{count_of} models, one at a time on the device" if count_of > 1 else "1 model"]
        elif role.has_model:
            facts += [_layout(role), _model(role, tokens, config.settings.judge_load if role.is_judge else None)]
        if name == "reward" and "actor" in config.roles:
            facts.append(config.settings.reward)
            if role.is_judge:
                is_early = judges_early(config.settings, True, role.ranks, config.roles["rollout"].ranks)
                facts.append("judges each response as it ends" if is_early else "judges after the rollout")
        if name == "reference" and (interval := config.settings.reference_update_interval):
            facts.append(f"gets the actor's weights every {interval:,} steps")
        if name in config.trained:
            facts.append(_trained(role, tokens))
            if name != "critic" and (decay := config.settings.ema_decay) is not None:
                facts.append(f"moving average with decay {decay:g}")
        rows.append((name, "; ".join(facts)))
        if name == "teacher":
            rows += _teachers(config, tokens)
    return rows


def _trained(role: RoleSettings, tokens: int) -> str:
    vocab_size = role.model_vocab_size(tokens)
    frozen = frozen_total(role.megatron, vocab_size, role.has_scalar_head)
    if not frozen:
        return "low-rank factors are trained" if role.lora else "trained"
    total = parameter_totals(role.megatron, vocab_size, role.has_scalar_head).total
    return f"trained, but {count(frozen)} of {count(total)} parameters frozen"


def _teachers(config: RunConfig, tokens: int) -> list[tuple[str, str]]:
    found = config.teachers
    models = [_model(role, tokens, role.run_folder) for role in found.models]
    return [(f"  {name}", models[number]) for name, number in zip(found.names, found.model_of, strict=True)]


def _layout(role: RoleSettings) -> str:
    sizes = parallel_sizes(role.megatron)
    named = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context, "EP": sizes.expert}
    named["DP"] = sizes.data(len(role.ranks))
    return ", ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one replica"


def _model(role: RoleSettings, tokens: int, loaded: str | None = None) -> str:
    """`loaded`: where its weights come from, if the role's settings do not say it."""
    args = role.megatron
    totals = parameter_totals(args, role.model_vocab_size(tokens), value_head=role.has_scalar_head)
    source = loaded or args.pretrained_checkpoint or (role.hf_model and role.hf_model.folder.path)
    size = f"{count(totals.total)} parameters" + f", {count(totals.active)} active" * (totals.active < totals.total)
    shape = f"{args.num_layers} layers, hidden size {args.hidden_size}, {size}"
    if role.hf_model is not None and args.model_folder is not None:
        shape = f"transformers' {role.hf_model.folder.config['model_type']}, self-check passed; {shape}"
    return f"{shape} from {source}" if source else shape


def _tokenizer(config: RunConfig, encoder: Encoder) -> str:
    role, tokenizer = next(iter(config.roles.values())), encoder.tokenizer
    ends = ", ".join(map(repr, tokenizer.end_tokens))
    is_file = role.chat_template not in (None, "none", "tokenizer")
    template = f"chat template {role.chat_template}" if is_file else "its chat template"
    if encoder.template is None:
        template = "no chat template"
    return f"{tokenizer.vocab_size:,} tokens from {role.tokenizer_model}, end {ends}; {template}"


def _first(inputs: Any, sets: dict[str, PromptSet], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """What the model reads of the first prompt or example; tokens that count in the loss are between ⟦ and ⟧."""
    example = getattr(inputs, "first_example", None)
    if example is None and sets:
        tokens = inputs.encoder.prompt(next(iter(sets.values()))[0])
        example = {"first": (tokens, [False] * len(tokens))}
    rows = []
    for name, (tokens, mask) in (example or {}).items():
        marked, position = "", 0
        for is_trained, run in groupby(mask):
            size = len(list(run))
            text = text_with_special(tokenizer, tokens[position : position + size], inputs.encoder.images)
            marked, position = marked + (f"⟦{text}⟧" if is_trained else text), position + size
        rows.append((name, _shown(tokens, marked)))
    return rows


def _shown(tokens: Sequence[int], text: str) -> str:
    cut = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
    return f"{len(tokens)} tokens: {cut}"


def text_with_special(tokenizer: Tokenizer, tokens: Sequence[int], images: Images | None = None) -> str:
    """The text of tokens with the strings of special ones, which `decode` drops, and with each image's size and
    tokens."""
    names = {number: name for name, number in tokenizer.special.items()}

    def name_of(token: int) -> str:
        if images is not None and token < 0 and (ref := images.of_token(token)) is not None:
            return f"{ref.name[:-1]}, {images.tokens(ref)} tokens]"
        return names.get(token, "")

    found = []
    for name, run in groupby(tokens, key=name_of):
        ids = list(run)
        count = sum(row_of(token) == 0 for token in ids) if ids[0] < 0 else len(ids)
        found.append(name * count if name else tokenizer.decode(ids))
    return "".join(found)


def _training(config: RunConfig, done: int) -> list[tuple[str, str]]:
    """`done`: as of `events_of`."""
    s, rows = config.settings, []
    if "rollout" in config.roles:
        losses = f"--advantage {s.advantage}, --policy-loss {s.policy_loss}, --loss-aggregation {s.loss_aggregation}"
        responses = expected_responses(s)
        size = f"{min(s.minibatch_size or responses, responses):,}"
        if group_sizes(s) != {s.samples_per_prompt}:
            size = f"{s.minibatch_groups or s.prompts_per_step:,} prompts"
        rows.append(("algorithm", losses))
        limits = f"at most {s.max_response_length:,} tokens, mini-batches of {size}"
        rows.append(("step", f"{s.prompts_per_step:,} prompts, {responses:,} responses of {limits}"))
    else:
        if config.command_line[0].endswith("preference"):
            rows.append(("algorithm", f"--preference-loss {s.preference_loss}"))
        batch = next(config.roles[name].megatron.global_batch_size for name in config.trained)
        rows.append(("step", f"--global-batch-size {batch}"))
    return [*rows, *_run(config, events_of(config, done))]


def _run(config: RunConfig, events: RunEvents) -> list[tuple[str, str]]:
    s = config.settings
    run = f"{events.last - events.first + 1:,} steps"
    run += f", {events.first:,} to {events.last:,}, from {s.load}" if s.load else ""
    run += f", in {s.save}" if s.save else ", nothing is saved (--save)"
    targets = {"--target-eval-loss": s.target_eval_loss, "--target-eval-accuracy": s.target_eval_accuracy}
    run += "".join(f", ends at {flag} {value:g}" for flag, value in targets.items() if value is not None)
    evaluations, best = _steps(events.evaluations(), events.eval_interval), ""
    if events.keeps_best and events.eval_interval:
        best = ", and after the best evaluation so far"
    rows = [("run", run), ("evaluation", evaluations if events.evaluates else "none (--eval-prompts)")]
    if events.saves:
        rows.append(("checkpoints", _steps(events.checkpoints(), events.save_interval) + best))
        for name in events.exports:
            rows.append((name, f"an export with each checkpoint, {name}/{step_name(events.last)} the last"))
    return rows + ([("trackers", s.trackers)] if s.save else [])


def _steps(steps: list[int], interval: int) -> str:
    """When something happens: the steps if they are few, else their rule."""
    before, after = "before the first step, " * (0 in steps), [f"{step:,}" for step in steps if step]
    if len(after) > _LISTED:
        return f"{before}every {interval:,} steps and after the last, {len(after):,} times"
    *others, last = after or [""]
    named = f"steps {', '.join(others)} and {last}" if others else f"step {last}"
    return f"{before}after {named}" if after else f"{before}none"
