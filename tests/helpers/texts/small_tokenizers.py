"""Small tokenizers of every kind that megarl reads, and chat templates for them."""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "Hello", "world", "user", "assistant", "system", "model", "12", "42", "</", "INST"]
ASCII = [chr(code) for code in range(33, 127)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_SAID = "{{- message.content + '<|im_end|>' }}{%- endgen"
_CALLED = "'[' + message.tool_calls[0].function.name + '()]'"
# With calls in Python, as LFM2's, which no format reads.
PYTHONIC = CHATML.replace(_SAID, "{{- " + _CALLED + " if message.tool_calls else '' }}" + _SAID)
assert PYTHONIC != CHATML

LLAMA = """\
{{- bos_token }}
{%- set state = namespace(date="1 May 2025") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set instruction = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instruction = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nDate: " + state.date + "\\n\\n" + instruction + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system, turns = messages[0]["content"], messages[1:] %}
{%- else %}
    {%- set system, turns = "", messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Roles must alternate: user, assistant, user, assistant ...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + (system + "\\n\\n" if loop.first and system else "") + message["content"] + " [/INST]" }}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{% for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{'<start_of_turn>model\\n'-}}
{% endif %}
"""

# For any tokenizer: uses only its BOS and EOS.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}|{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant|{% endif %}"
)


def _merged(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens that spell each word from the left, and the merges that make them."""
    merges = {(word[:end], word[end]): None for word in words for end in range(1, len(word))}
    return list(dict.fromkeys(a + b for a, b in merges)), list(merges)


def _numbered(*groups: list[str]) -> dict[str, int]:
    pieces = dict.fromkeys(piece for group in groups for piece in group)
    return {piece: number for number, piece in enumerate(pieces)}


def save(folder: Path, tokenizer: Tokenizer, special: list[str], **config) -> str:
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def _byte_level(words: list[str]) -> Tokenizer:
    pieces, merges = _merged(words)
    made = Tokenizer(models.BPE(_numbered(sorted(pre_tokenizers.ByteLevel.alphabet()), pieces), merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def chatml(folder: Path) -> str:
    """Byte-level BPE without BOS."""
    made = _byte_level([*WORDS, "\u0120the", "\u0120world", "\u010a\u010a"])
    return save(folder, made, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>",
                pad_token="<|endoftext|>", chat_template=CHATML)  # fmt: skip


def llama(folder: Path) -> str:
    """Byte-level BPE with its own pattern; the post-processor would add a BOS too."""
    made = _byte_level([*WORDS, "\u0120the", "\u010a\u010a"])
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens(special)
    bos = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    made.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return save(folder, made, special, bos_token=bos[0], eos_token="<|eot_id|>", chat_template=LLAMA)


def _byte_fallback(special: list[str]) -> Tokenizer:
    pieces, merges = _merged([*WORDS, "\u2581the", "\u2581Hello", "\u2581[INST]", "\u2581world"])
    vocabulary = _numbered(special, BYTES, ["\u2581", "\n", *ASCII], pieces)
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def mistral(folder: Path) -> str:
    """BPE over a text whose spaces are visible, one more in front; other characters spelt in bytes."""
    special = ["<unk>", "<s>", "</s>"]
    made = _byte_fallback(special)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(folder, made, special, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL)


def gemma(folder: Path) -> str:
    """The same with no space in front, and a template in a separate file."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    made = _byte_fallback(special)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = save(folder, made, special, bos_token="<bos>", eos_token="<end_of_turn>", unk_token="<unk>",
                pad_token="<pad>")  # fmt: skip
    (folder / "chat_template.jinja").write_text(GEMMA)
    return path


def unigram(folder: Path) -> str:
    """Unigram: has its special tokens in the vocabulary too, and its normalizer makes them from full-width letters."""
    special = ["<s>", "</s>", "<unk>", "<pad>"]
    pieces = [*special, "\u2581", *ASCII, *WORDS]
    scores = [(piece, 0.0 if piece in special else -9.0 / len(piece)) for piece in dict.fromkeys(pieces)]
    made = Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return save(folder, made, special, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
                chat_template=PLAIN)  # fmt: skip


def wordpiece(folder: Path) -> str:
    """WordPiece in lower case: loses white space, case and all but ASCII."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [word.lower() for word in WORDS]
    vocabulary = _numbered(special, ASCII, [f"##{character}" for character in ASCII], words)
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return save(folder, made, special, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]",
                chat_template=PLAIN)  # fmt: skip


def characters(folder: Path) -> str:
    """100 tokens, for small models: four special ones with the first ids, space, new line and ASCII; the template in a
    separate file."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    made = Tokenizer(models.BPE(_numbered(special, ["\u2581", "\n", *ASCII]), [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    path = save(folder, made, special, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>")
    (folder / "chat_template.jinja").write_text(CHATML)
    return path


def sentence_piece(path: Path, **options) -> str:
    """A SentencePiece model for any text, with byte fallback."""
    settings: dict[str, Any] = dict(model_type="bpe", vocab_size=330, byte_fallback=True, character_coverage=1.0)
    settings |= dict.fromkeys(("hard_vocab_limit", "add_dummy_prefix", "remove_extra_whitespaces"), False)
    settings |= dict(pad_id=0, unk_id=1, bos_id=2, eos_id=3, control_symbols=["<|im_start|>", "<|im_end|>"])
    settings |= dict(normalization_rule_name="identity", num_threads=1, minloglevel=2)
    model = io.BytesIO()
    texts = [" ".join(WORDS), "Hello world", "the user\n"] * 3
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **(settings | options))
    path.write_bytes(model.getvalue())
    return str(path)


HUGGING_FACE = {
    "chatml": chatml, "llama": llama, "mistral": mistral, "gemma": gemma, "unigram": unigram, "wordpiece": wordpiece,
}  # fmt: skip
