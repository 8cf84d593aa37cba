"""A tokenizer of one id a character, and encoders that use it, without and with a chat template."""

from megarl.data.chat import ChatTemplate
from megarl.data.conversations import Encoder


class CharacterTokenizer:
    """One id a character, 0 for the dollar sign of a template; tabs vanish."""

    eos_id, bos_id, pad_id, vocab_size = 0, None, 0, 0x110000
    eos_token, bos_token, special, template = "$", None, {"$": 0}, None
    end_ids, end_tokens, fingerprint = (0,), ("$",), "characters"
    prefix_ids, named = (), {"eos_token": "$"}

    def encode(self, text):
        return [ord(character) for character in text.replace("\t", "")]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def encode_template(self, text):
        return [i if i != ord("$") else 0 for i in self.encode(text)]

    def encode_template_batch(self, texts):
        return [self.encode_template(text) for text in texts]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i)


PLAIN = Encoder(CharacterTokenizer())
CHAT = Encoder(
    CharacterTokenizer(),
    ChatTemplate("{% for m in messages %}{{ m.role[0] + m.content + ('$' if m.role[0] == 'a' else '') }}{% endfor %}"
                 "{{ 'a' if add_generation_prompt }}", CharacterTokenizer()),
)  # fmt: skip
