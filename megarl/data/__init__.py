"""Prompt files and their order, tokenizers, chat templates, supervised examples and preference pairs."""

# Name in --tokenizer-type -> its class, imported when it is asked for.
TOKENIZERS = {
    "SentencePieceTokenizer": "megarl.data.tokenizers:SentencePieceTokenizer",
    "HuggingFaceTokenizer": "megarl.data.tokenizers_hf:HuggingFaceTokenizer",
}
