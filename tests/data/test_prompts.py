"""Prompt formats: the published strings, what is supervised, and that what a model reads is the same in training and in use."""

import itertools

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data.packing import AUDIO
from data.prompts import FORMATS, Format, Span, Turn, spans
from data.sources import writer
from data.tokenizer import Tokenizer as Encoder
from data.tokenizer import encode_spans
from tests.data.files import config

SYSTEM, ASK, REPLY = Turn("system", "Sys"), Turn("user", "Hi"), Turn("assistant", "Yo")
AGAIN, BYE = Turn("user", "Go"), Turn("assistant", "Ok")

# As the public chat templates and the tests of NeMo's formatters write them: one exchange, with a system turn, two exchanges.
GOLDENS = {
    "plain": ("HiYo<|eos|>", None, "HiYo<|eos|>GoOk<|eos|>"),
    "qwen": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n",
        "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\nOk<|im_end|>\n"),
    "qwen3": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYo<|im_end|>\n",
        "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYo<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nOk<|im_end|>\n"),
    "nemotron-nano-v3": (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>Yo<|im_end|>\n",
        "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>Yo<|im_end|>\n",
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>Yo<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n<think></think>Ok<|im_end|>\n"),
    "nemotron-h": (
        "<SPECIAL_10>System\n\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nYo\n<SPECIAL_11>",
        "<SPECIAL_10>System\nSys\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nYo\n<SPECIAL_11>",
        "<SPECIAL_10>System\n\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nYo\n<SPECIAL_11>User\nGo\n<SPECIAL_11>Assistant\nOk\n<SPECIAL_11>"),
    "llama2": (
        "<s>[INST] Hi [/INST] Yo </s>", "<s>[INST] <<SYS>>\nSys\n<</SYS>>\n\nHi [/INST] Yo </s>",
        "<s>[INST] Hi [/INST] Yo </s><s>[INST] Go [/INST] Ok </s>"),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nSys<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nOk<|eot_id|>"),
    "mistral": (
        "<s>[INST] Hi [/INST] Yo</s>", "<s>[INST] Sys\n\nHi [/INST] Yo</s>", "<s>[INST] Hi [/INST] Yo</s>[INST] Go [/INST] Ok</s>"),
    "gemma": (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n",
        "<bos><start_of_turn>user\nSys\n\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n"
        "<start_of_turn>user\nGo<end_of_turn>\n<start_of_turn>model\nOk<end_of_turn>\n"),
    "glm": (
        "<|user|>\nHi<|assistant|>\nYo<|user|>", "<|system|>\nSys<|user|>\nHi<|assistant|>\nYo<|user|>",
        "<|user|>\nHi<|assistant|>\nYo<|user|>\nGo<|assistant|>\nOk<|user|>"),
    "canary": ("<|startoftranscript|>HiYo<|endoftext|>", None, None),
}
THOUGHT = Turn("assistant", "Yo", thought="hm")


def text(parts: list[Span]) -> str:
    return "".join(part.text for part in parts)


@pytest.mark.parametrize("name", GOLDENS)
def test_published_strings(name: str) -> None:
    one, with_system, two = GOLDENS[name]
    form = FORMATS[name]
    assert text(spans(form, [ASK, REPLY])) == one
    if with_system:
        assert text(spans(form, [SYSTEM, ASK, REPLY])) == with_system
    if two:
        assert text(spans(form, [ASK, REPLY, AGAIN, BYE])) == two


def test_thoughts_are_learned_and_forgotten_in_the_history() -> None:
    form = FORMATS["qwen3-thinking"]
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert spans(form, [ASK]) == [Span(opening)]
    assert spans(form, [ASK, THOUGHT]) == [Span(opening), Span("<think>\nhm\n</think>\n\nYo<|im_end|>", True), Span("\n")]
    assert text(spans(form, [ASK, THOUGHT, AGAIN])) == opening + "Yo<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"


def test_every_format_has_its_golden() -> None:
    assert set(FORMATS) == {*GOLDENS, "qwen3-thinking"}


@pytest.mark.parametrize("name, turns", list(itertools.product(FORMATS, ([ASK, REPLY], [ASK, REPLY, AGAIN, BYE]))))
def test_what_is_learned_follows_exactly_what_is_given_in_use(name: str, turns: list[Turn]) -> None:
    form = FORMATS[name]
    parts, asked = spans(form, turns), text(spans(form, turns[:-1]))
    answer = form.lead + turns[-1].text + form.closing + form.end
    assert parts[-1].supervised or parts[-1] == Span(form.after)
    learned = [i for i, part in enumerate(parts) if part.supervised]
    assert text(parts[: learned[-1]]) == asked
    assert parts[learned[-1]].text == answer
    assert len(learned) == (1 if form.past_opening is not None else len(turns) // 2)


def test_an_end_token_of_ones_own_is_learned_and_hides_no_turn() -> None:
    assert text(spans(FORMATS["glm"], [ASK, REPLY, AGAIN], "<|endoftext|>")) == (
        "<|user|>\nHi<|assistant|>\nYo<|endoftext|><|user|>\nGo<|assistant|>\n")


@pytest.mark.parametrize("turns", [[], [REPLY], [ASK, AGAIN], [SYSTEM], [ASK, SYSTEM, REPLY], [SYSTEM, SYSTEM, ASK]], ids=str)
def test_other_orders_of_turns_are_refused(turns: list[Turn]) -> None:
    with pytest.raises(ValueError, match=r"a conversation has the turns .*; it must be"):
        spans(FORMATS["qwen"], turns)


def test_a_system_turn_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for a system turn"):
        spans(FORMATS["canary"], [SYSTEM, ASK])


def byte_level(special: list[str]) -> Tokenizer:
    """What Qwen, Llama 3 and Nemotron ship, small: byte-pair merges over bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special,
                                  show_progress=False)
    backend.train_from_iterator(["user\n assistant\n\n one two three", " Hi there Yo man \n\n"] * 5, trainer)
    return backend


def sentence_pieces(special: list[str]) -> Tokenizer:
    """What Llama 2 ships, small: a space becomes a sign, and one stands before every text."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzHYGO[]/INST<>SYS\n|", "\u2581H", "\u2581Hi", "\u2581Y", "\u2581Yo"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(["<unk>", *special, *letters]))}
    merges = [("\u2581", "H"), ("\u2581H", "i"), ("\u2581", "Y"), ("\u2581Y", "o")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def special_tokens(form: Format) -> list[str]:
    whole = text(spans(form, [ASK, REPLY])) + form.system[0] + form.user[0]
    found = {part + ">" for part in whole.replace("[gMASK]", "").split(">")[:-1] for part in ["<" + part.rpartition("<")[2]]}
    return sorted(found - {"<think>", "</think>", "<<SYS>>", "<</SYS>>"} | {form.end, "<|audio|>"})


def encoder(form: Format, backend: Tokenizer) -> Encoder:
    ids = backend.get_vocab()
    return Encoder(backend, ids["<|audio|>"], ids[form.end], (ids[form.end],))


@pytest.mark.parametrize("name, make", [*((name, byte_level) for name in FORMATS), *((n, sentence_pieces) for n in ("llama2", "mistral"))])
def test_tokens_under_the_mask_are_the_answer_and_its_end(name: str, make) -> None:
    form = FORMATS[name]
    tokenizer = encoder(form, make(special_tokens(form)))
    turns = [ASK, REPLY, AGAIN, BYE]
    ids, supervised = encode_spans(spans(form, turns), tokenizer)
    prompt, none = encode_spans(spans(form, turns[:-1]), tokenizer)
    last = ids[len(prompt):]
    assert ids[: len(prompt)] == prompt
    learned = [i for i, on in zip(last, supervised[len(prompt):], strict=True) if on]
    assert learned[-1] == tokenizer.eos_id
    assert tokenizer.decode(learned[:-1]).strip() == "Ok"
    assert supervised[: len(prompt)] == none
    earlier = [i for i, on in zip(prompt, none, strict=True) if on]
    assert tokenizer.decode(earlier).strip() == ("" if form.past_opening is not None else "Yo")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False).replace(" ", "") == text(spans(form, turns)).replace(" ", "")


def test_llama2_puts_one_space_before_an_answer() -> None:
    """A tokenizer of that kind puts a space before every text, so the one of the format must not be added to it."""
    form = FORMATS["llama2"]
    tokenizer = encoder(form, sentence_pieces(special_tokens(form)))
    ids, supervised = encode_spans(spans(form, [ASK, REPLY]), tokenizer)
    learned = [tokenizer.backend.id_to_token(i) for i, on in zip(ids, supervised, strict=True) if on]
    assert learned == ["\u2581Yo", "\u2581", "</s>"]
    assert learned != [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(" Yo </s>")]


def test_rows_are_written_in_the_configured_format(tmp_path) -> None:
    form = FORMATS["nemotron-nano-v3"]
    byte_level(special_tokens(form)[1:]).save(str(tmp_path / "tokenizer.json"))  # "<|audio|>" sorts first, and is added
    cfg = config(tokenizer=str(tmp_path), prompt_format="nemotron-nano-v3", system="Sys", prompt="Hi <|audio|>there")
    written = writer(cfg)
    item = written.item("x", "Yo man", 16000, None)  # type: ignore[arg-type]
    read = [written.tokenizer.audio_id if i == AUDIO else i for i in item.prompt]
    assert written.tokenizer.backend.decode(read, skip_special_tokens=False) == (
        "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nHi <|audio|>there<|im_end|>\n<|im_start|>assistant\n<think></think>")
    assert (list(item.answer), item.end) == (written.tokenizer.encode("Yo man"), (written.tokenizer.eos_id,))


def test_other_stop_tokens_of_a_format_end_generation_where_the_tokenizer_has_them(tmp_path) -> None:
    form = FORMATS["qwen3"]
    for more in ([], ["<|endoftext|>"]):
        backend = byte_level([*special_tokens(form), *more])
        backend.save(str(tmp_path / "tokenizer.json"))
        found = writer(config(tokenizer=str(tmp_path), prompt_format="qwen3", prompt="<|audio|>")).tokenizer
        assert found.stop_ids == (backend.token_to_id("<|im_end|>"), *(backend.token_to_id(token) for token in more))
