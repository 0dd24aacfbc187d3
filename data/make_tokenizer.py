"""Writes the embedded character tokenizer, data/speech/tokenizer.json: python -m data.make_tokenizer"""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPEECH = Path(__file__).parent / "speech"
SPECIAL = ("<|pad|>", "<|eos|>", "<|audio|>", "<|unk|>")


def characters() -> list[str]:
    """Letters, digits, space, apostrophe and whatever else the embedded transcripts contain, sorted."""
    lines = (SPEECH / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    seen = set("".join(json.loads(line)["text"].lower() for line in lines))
    return sorted(seen | set(string.ascii_lowercase + string.digits + " '"))


def character_tokenizer(alphabet: list[str]) -> Tokenizer:
    """A byte-pair model without merges: one token a character, in lower case."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


if __name__ == "__main__":
    character_tokenizer(characters()).save(str(SPEECH / "tokenizer.json"))
