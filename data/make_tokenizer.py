"""Writes the embedded subword tokenizer, data/speech/tokenizer.json: python -m data.make_tokenizer"""

import json
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPEECH = Path(__file__).parent / "speech"
SPECIAL = ("<|pad|>", "<|eos|>", "<|audio|>", "<|unk|>")
VOCABULARY = 256


def transcripts() -> list[str]:
    """The embedded transcripts, in lower case."""
    lines = (SPEECH / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"].lower() for line in lines]


def subword_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Tokenizer:
    """Byte-pair merges learnt from `texts`, inside words with the space before them, over letters, digits and what else `texts` contain."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    alphabet = sorted({*"".join(texts), *string.ascii_lowercase, *string.digits, *" '"})
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f" {text}" for text in texts], trainer)
    return tokenizer


if __name__ == "__main__":
    subword_tokenizer(transcripts()).save(str(SPEECH / "tokenizer.json"))
