"""The sampling fields of every dialect: names, ranges, defaults, and what each does.

`SamplingFields` are alike in all dialects; the struct of a dialect has the others. Requests inherit them, so
parsers, `Sampling`, /openapi.json and the tables of docs/ have them from here: a description is the text of a field's
error and its documentation. To add a sampling parameter, add it here, to `Sampling` (shared/sampling.py), and to
workers/engine/logits_processors.py, which says what it does to a distribution.

Knows no HTTP server, no model, and nothing of a request but these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, structs

from shared.protocol import Sampling

# Languages without signs send their random numbers of 64 bits.
MAX_SENT_SEED = 2**64 - 1
MAX_STOP_SEQUENCES = 4  # of Text Generation Inference
MAX_SESSION_CHARS = 128


def number(low: float, high: float, words: str = "") -> Meta:
    """A field's bounds, which begin its description; `words` follow them."""
    return Meta(ge=low, le=high, description=f"a number from {low:g} to {high:g}{words}")


def whole(low: int, high: int, words: str = "", of: str = "") -> Meta:
    """As `number`, for a whole number, as one " of tokens"."""
    return Meta(ge=low, le=high, description=f"a whole number{of} from {low} to {high}{words}")


def text(max_length: int, words: str = "") -> Meta:
    """As `number`, for a string."""
    return Meta(max_length=max_length, description=f"a string of up to {max_length} characters{words}")


_TOP_K = Meta(
    ge=-1, description="a whole number, 1 or more (0 and -1: off): draws from this number of likeliest tokens"
)
_TOP_P = "draws from the likeliest tokens that have this probability together"
_TYPICAL_P = "draws from the tokens that are about as likely as expected and have this probability together"
_PENALTY = number(-2, 2)
_SENT_SEED = Meta(
    ge=-1, description=f"a whole number from 0 to {MAX_SENT_SEED}, of which the lower 63 bits count, or -1 (random)"
)
_SINGLE_LINE = Meta(description="true (end at a newline) or false")
_Stop: TypeAlias = Annotated[str, Meta(max_length=256)]
_Stops: TypeAlias = _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOP_SEQUENCES)]
_Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class SamplingFields(Struct, kw_only=True, frozen=True):
    """Those that all dialects have. By default, each changes nothing."""

    min_p: Annotated[float, number(0, 1, " (0: off): drops tokens less likely than this share of the likeliest")] = 0.0
    typical_p: Annotated[float, number(0, 1, f" (0 and 1: off): {_TYPICAL_P}")] = 1.0
    # Close to 0, it would make the logits of tokens infinite.
    repetition_penalty: Annotated[
        float, number(0.01, 100, ": above 1, tokens that the text or its prompt has become less likely")
    ] = 1.0
    seed: Annotated[int | None, Meta(description="a whole number (-1: random)")] = None


class OwnFields(SamplingFields, kw_only=True, frozen=True):
    """Of `/autocomplete` and `/jobs`."""

    temperature: Annotated[float, number(0, 5, " (0: greedy)")] = 1.0
    top_k: Annotated[int, _TOP_K] = 50
    top_p: Annotated[float, number(0, 1, f" (0 and 1: off): {_TOP_P}")] = 0.95
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]],
        Meta(max_length=8, description="a list of up to 8 strings of 1 to 256 characters, before which a text ends"),
    ] = []
    single_line: Annotated[bool, _SINGLE_LINE] = False
    seed: Annotated[int, _SENT_SEED] | None = None


class OpenAIFields(SamplingFields, kw_only=True, frozen=True):
    """Of `/v1/completions`. By default, each changes nothing."""

    temperature: Annotated[float, number(0, 2, " (0: greedy)")] = 1.0
    top_k: Annotated[int, _TOP_K] = 0
    top_p: Annotated[float, number(0, 1, f" (0: greedy, 1: off): {_TOP_P}")] = 1.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    logit_bias: Annotated[
        Annotated[dict[str, _Bias], Meta(max_length=1024)]
        | Annotated[list[tuple[Annotated[int, Meta(ge=0)] | _Stop, _Bias | bool]], Meta(max_length=1024)],
        Meta(
            description="an object of up to 1024 members, token ids with numbers from -100 to 100, or a list of pairs"
            " (false: never this token)"
        ),
    ] = {}
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=16)],
        Meta(description="a string of up to 256 characters (empty: none), or a list of up to 16 of them"),
    ] = []
    single_line: Annotated[bool, _SINGLE_LINE] = False


class TgiFields(SamplingFields, kw_only=True, frozen=True):
    """Of Text Generation Inference and JumpStart."""

    do_sample: Annotated[bool, Meta(description="true or false")] = False
    temperature: Annotated[float, number(0, 100, " (0: greedy)")] | None = None
    top_k: Annotated[int, _TOP_K] | None = None
    top_p: Annotated[float, number(0, 1, f" (0: greedy, 1: off): {_TOP_P}")] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1, description=f"a number above 0, up to 1 (off): {_TYPICAL_P}")] = 1.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    stop: Annotated[
        _Stops,
        Meta(description=f"a string of up to 256 characters, or a list of up to {MAX_STOP_SEQUENCES} (empty: none)"),
    ] = []
    stop_sequences: Annotated[_Stops, Meta(description="as stop, to which they are added")] = []

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; else decoding is greedy."""
        is_shaped = (self.temperature, self.top_k, self.top_p, self.typical_p) != (None, None, None, 1)
        return self.do_sample or is_shaped

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Both lists of stop sequences, each sequence once."""
        return tuple(dict.fromkeys((*_stop_strings(self.stop), *_stop_strings(self.stop_sequences))))


# Samplers of other servers that Tercet lacks: values by which they are off, besides null, false and 0, and the end of
# the warning.
OTHER_SAMPLERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("tfs_z", "encoder_repetition_penalty"), ((1,), "")),
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), ((-1,), "")),
    "repeat_last_n": ((64, -1), "; repetition_penalty considers the whole text"),
}


def sampling_of(request: SamplingFields, max_new_tokens: int, vocab_size: int, **changes: object) -> Sampling:
    """The sampling parameters of a parsed request, for every branch.

    Args:
        changes: parameters that are not as the request has them.
    """
    values: dict[str, Any] = {name: getattr(request, name) for name in _names(type(request))} | changes
    values = {name: getattr(_OFF, name) if value is None else value for name, value in values.items()}
    if not 0 < values["top_k"] < vocab_size:
        values["top_k"] = 0
    if values["top_p"] == 0 and not isinstance(request, OwnFields):  # the limit of small values: the likeliest is left
        values |= {"temperature": 0.0, "top_p": 1.0}
    if isinstance(request, TgiFields) and not request.is_sampled:
        values["temperature"] = 0.0
    values |= {"stop": _stop_strings(values["stop"]), "max_new_tokens": max_new_tokens}
    # What is as usual is not sent to workers.
    return Sampling(**{name: value for name, value in values.items() if value != _DEFAULTS[name]})


_OFF = OpenAIFields()
_DEFAULTS = structs.asdict(Sampling())
_SHARED = set(Sampling.__struct_fields__) & set(OpenAIFields.__struct_fields__)


@cache
def _names(kind: type[Struct]) -> list[str]:
    """The sampling fields of a struct, but for its seed."""
    return [name for name in kind.__struct_fields__ if name in _SHARED]


def _stop_strings(sent: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a request has them: one or several. An empty one stops nothing."""
    return tuple(filter(None, [sent] if isinstance(sent, str) else sent))
