"""Prompt formats as data: the exact strings around the turns of a conversation, and which of them a model has to learn.

Training and inference text of a format agree by construction: both come from `spans`, and what a model is asked to continue is what stands
before the supervised span of the same conversation with its answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Pair = tuple[str, str]  # what stands before and behind a text


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str  # system | user | assistant
    text: str
    thought: str = ""  # what an assistant thinks before it answers, where the format has a place for it


@dataclass(frozen=True)
class Span:
    """A part of the text, and whether the model learns to write it."""

    text: str
    supervised: bool = False


@dataclass(frozen=True)
class Format:
    """The strings of one family."""

    user: Pair
    opening: str  # the end of every prompt: an answer follows
    end: str  # the token that ends an answer; supervised
    begin: str = ""  # before everything, once
    system: Pair = ("", "")
    system_inside: bool = False  # the system text is a part of the first user turn
    system_default: str | None = None  # what stands for a system turn that is missing; None: nothing does
    restart: str = ""  # before every user turn but the first
    lead: str = ""  # between `opening` and an answer; supervised, since a space is mostly one token with the word behind it
    closing: str = ""  # between an answer and its end token; supervised
    after: str = ""  # behind the end token, where more can follow
    end_opens_next: bool = False  # the end token is the one that the next user turn begins with
    past_opening: str | None = None  # `opening` of answers that are history, where it is another; such answers are not supervised
    thought: Pair | None = None  # around an assistant's thought; None: the format has no place for it
    stops: tuple[str, ...] = field(default=())  # tokens besides `end` that also end an answer of a published model


def _chatml(**changes: object) -> Format:
    return Format(**{"user": ("<|im_start|>user\n", "<|im_end|>\n"), "system": ("<|im_start|>system\n", "<|im_end|>\n"),  # type: ignore[arg-type]
                     "opening": "<|im_start|>assistant\n", "end": "<|im_end|>", "after": "\n", **changes})


FORMATS: dict[str, Format] = {
    "plain": Format(user=("", ""), opening="", end="<|eos|>"),
    "nemotron-nano-v3": _chatml(opening="<|im_start|>assistant\n<think></think>", system_default="", stops=("</s>",)),
    "nemotron-h": Format(
        system=("<SPECIAL_10>System\n", "\n"), system_default="", user=("<SPECIAL_11>User\n", "\n"), opening="<SPECIAL_11>Assistant\n",
        closing="\n", end="<SPECIAL_11>", end_opens_next=True, stops=("<SPECIAL_12>", "</s>")),
    "qwen": _chatml(stops=("<|endoftext|>",)),
    "qwen3": _chatml(opening="<|im_start|>assistant\n<think>\n\n</think>\n\n", past_opening="<|im_start|>assistant\n",
                     stops=("<|endoftext|>",)),
    "qwen3-thinking": _chatml(past_opening="<|im_start|>assistant\n", thought=("<think>\n", "\n</think>\n\n"), stops=("<|endoftext|>",)),
    "llama2": Format(
        begin="<s>", system=("<<SYS>>\n", "\n<</SYS>>\n\n"), system_inside=True, user=("[INST] ", " [/INST]"), restart="<s>",
        opening="", lead=" ", closing=" ", end="</s>"),
    "llama3": Format(
        begin="<|begin_of_text|>", system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"), opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>", stops=("<|end_of_text|>", "<|eom_id|>")),
    "mistral": Format(begin="<s>", system=("", "\n\n"), system_inside=True, user=("[INST] ", " [/INST]"), opening="", lead=" ",
                      end="</s>"),
    "gemma": Format(
        begin="<bos>", system=("", "\n\n"), system_inside=True, user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        opening="<start_of_turn>model\n", end="<end_of_turn>", after="\n", stops=("<eos>",)),
    # GLM-ASR: the user turn is "<|begin_of_audio|><|audio|><|end_of_audio|><|user|>\nPlease transcribe this audio into text"
    "glm": Format(
        system=("<|system|>\n", ""), user=("<|user|>\n", ""), opening="<|assistant|>\n", end="<|user|>", end_opens_next=True,
        stops=("<|endoftext|>", "<|observation|>")),
    # the user turn is four special tokens: "<|en|><|transcribe|><|en|><|pnc|>"
    "canary": Format(user=("<|startoftranscript|>", ""), opening="", end="<|endoftext|>"),
}


def spans(form: Format, turns: Sequence[Turn], end: str | None = None) -> list[Span]:
    """The whole text of a conversation, piece by piece; neighbouring spans differ in `supervised`.

    Where the last turn is the user's, the last span is the text to generate from. `end` replaces the format's end token.
    Raises ValueError for turns in an order that the format cannot write.
    """
    _check(form, turns)
    if form.system_default is not None and turns[0].role != "system":
        turns = [Turn("system", form.system_default), *turns]
    return _joined(_pieces(form, turns, form.end if end is None else end))


def _check(form: Format, turns: Sequence[Turn]) -> None:
    roles = [turn.role for turn in turns]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    wanted = ["user", "assistant"] * len(talk)
    if not talk or talk != wanted[: len(talk)]:
        raise ValueError(f"a conversation has the turns {', '.join(roles) or 'none'}; it must be [system,] user, assistant, user, ...")
    if roles[0] == "system" and not form.system_inside and form.system == ("", ""):
        raise ValueError("this prompt format has no place for a system turn; leave it out")


def _pieces(form: Format, turns: Sequence[Turn], end: str) -> Iterator[Span]:
    yield Span(form.begin)
    inside, started = "", False
    for i, turn in enumerate(turns):
        last = i + 1 == len(turns)
        if turn.role == "system" and form.system_inside:
            inside = form.system[0] + turn.text + form.system[1]
        elif turn.role == "system":
            yield Span(form.system[0] + turn.text + form.system[1])
        elif turn.role == "user":
            before = form.user[0]
            if started and form.end_opens_next and end == form.end:
                before = before.removeprefix(end)
            yield Span((form.restart if started else "") + before + inside + turn.text + form.user[1])
            inside, started = "", True
        else:
            yield from _answer(form, turn, end, live=last or form.past_opening is None)
    if turns[-1].role == "user":
        yield Span(form.opening)


def _answer(form: Format, turn: Turn, end: str, live: bool) -> Iterator[Span]:
    """An answer as the model must write it, or as it stands in its history."""
    thought = form.thought[0] + turn.thought + form.thought[1] if live and form.thought and turn.thought else ""
    yield Span(form.opening if live or form.past_opening is None else form.past_opening)
    yield Span(form.lead + thought + turn.text + form.closing + end, supervised=live)
    yield Span(form.after)


def _joined(pieces: Iterator[Span]) -> list[Span]:
    out: list[Span] = []
    for piece in pieces:
        if out and out[-1].supervised == piece.supervised:
            out[-1] = Span(out[-1].text + piece.text, piece.supervised)
        elif piece.text:
            out.append(piece)
    return out
