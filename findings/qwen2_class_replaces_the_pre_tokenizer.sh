#!/usr/bin/env bash
# transformers 5.24.0: a folder of tokenizer class Qwen2Tokenizer is encoded with the class's own pre-tokenizer, not
# with that of its tokenizer.json.
# The class cuts numbers into digits; a tokenizer.json that merges them gives other ids.
# Output: Qwen2Tokenizer 16 ids, the folder's tokenizer.json 10 ids
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need transformers==5.24.0 tokenizers==0.23.3
"$PYTHON" - 2>/dev/null <<'PYTHON'
import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
merges = []
for word in ("2026", "1234", "Ġ2026"):
    for end in range(1, len(word)):
        pair = (word[:end], word[end])
        if pair not in merges:
            merges.append(pair)
        vocab.setdefault(word[: end + 1], len(vocab))
own = Tokenizer(models.BPE(vocab=vocab, merges=merges))
own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
own.decoder = decoders.ByteLevel()
own.save("tokenizer.json")
pathlib.Path("tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
pathlib.Path("config.json").write_text(json.dumps({"model_type": "qwen2"}))
text = "in 2026 and 1234"
read = AutoTokenizer.from_pretrained(".")
found = type(read).__name__, len(read(text).input_ids), len(own.encode(text).ids)
print("{} {} ids, the folder's tokenizer.json {} ids".format(*found))
assert found == ("Qwen2Tokenizer", 16, 10)
PYTHON
