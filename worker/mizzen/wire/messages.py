"""What gateways and engines say to each other.

A gateway holds one DEALER socket an engine; the engine binds one ROUTER. Each ZMQ message is one frame: a
msgpack array whose first element is the message's tag. Handles (`rid`) are chosen by the gateway and unique
on its connection while the request lives. Packed integer columns are little-endian `bytes`.

    gateway ──Hello──▶ engine ──Welcome──▶ gateway            first, and again after a reconnect
    gateway ──FetchFile──▶ engine ──File──▶ gateway           tokenizer and configuration files, in parts
    gateway ──Generate / Abort──▶ engine ──Outputs / Refused──▶ gateway
    gateway ──Embed──▶ engine ──Embedding / Refused──▶ gateway
    engine ──Stats / Blocks──▶ gateway                        on change, Stats at least once a second

An `Abort` is always answered by a `Finish` in an `Outputs` frame (or was overtaken by one), so both sides
agree on when a handle is free. A `Refused` frees its handle too.

A connection starts with `Hello`, and each further `Hello` starts it anew: the engine aborts what it still
runs for it, all handles are free, `Blocks.sequence` begins at 0. Any other frame from a connection without
one is refused with `RefusalCode.UNKNOWN_PEER`. An engine forgets a connection that does not take its frames
(its queue is full, ZMQ drops at the high-water mark) or does not answer heartbeats, and tells it so with
`Refused(None, UNKNOWN_PEER)` as soon as it can: the gateway treats all its handles as lost and says `Hello`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from mizzen.core.sampling_params import PARAMETERS

PROTOCOL = 2
"""Grows with every incompatible change; both sides refuse another's."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
FILE_PART_BYTES = 4 * 1024 * 1024
MAX_GRAMMAR_BYTES = 512 * 1024
"""Of `Sampling.grammar`'s text, at most: a frame that is longer than a request can be ends its connection."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the class's name is the tag."""


if TYPE_CHECKING:

    class Sampling(msgspec.Struct, frozen=True):
        """`mizzen.core.sampling_params.SamplingParams` without the parameters that stay in the gateway."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    # An array with the parameters in the order of their declaration in `SamplingParams`.
    Sampling = msgspec.defstruct(
        "Sampling",
        [(entry.name, entry.wire_type, entry.default) for entry in PARAMETERS if entry.sent],
        frozen=True,
        array_like=True,
        module=__name__,
    )


class Hello(Message, frozen=True):
    """A gateway introduces itself."""

    protocol: int
    gateway: str


class Generate(Message, frozen=True):
    """Continue a prompt."""

    rid: int
    prompt: bytes
    """int32 token ids."""
    sampling: Sampling
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0
    """How long the request may wait in the engine's queue before it is refused; 0 is no limit of its own."""
    generated: int = 0
    """So many last tokens of `prompt` are output that an engine gave before it was lost: limits, penalties
    and the grammar count them as output, and `Outputs.offsets` go on from there."""
    tenant: int = 0
    """Opaque: requests of one number are one tenant's, whom the engine lets starve no other."""


class Embed(Message, frozen=True):
    """Run a prompt and return one vector of its last hidden states (after the final norm)."""

    rid: int
    prompt: bytes
    """int32 token ids."""
    pooling: str = "last"
    """`last` (the last token's) or `mean` (over all tokens)."""
    normalize: bool = True
    """Scale the vector to length 1."""
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0


class Abort(Message, frozen=True):
    """Stop a request."""

    rid: int


class FetchFile(Message, frozen=True):
    """Ask for a file named in `Welcome.files`, from a byte offset.

    An engine keeps a few asks of a gateway (`WireLimits.file_asks`), and refuses more with
    `RefusalCode.QUEUE_FULL`.
    """

    name: str
    offset: int = 0
    """A multiple of FILE_PART_BYTES."""


class Welcome(Message, frozen=True):
    """An engine introduces itself."""

    protocol: int
    engine: str
    """Its name; the pod's, on Kubernetes."""
    incarnation: str
    """Random at every start: all that a gateway knew of a former one is void."""
    revision: str
    model: str
    """The name that the engine was told to serve under."""
    tokenizer_hash: str
    """Of the files below: equal hashes tokenize and render alike."""
    files: dict[str, int]
    """Tokenizer and configuration files that `FetchFile` serves: name to size in bytes."""
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    """Tokens that end a request unless `ignore_eos`."""
    page_size: int
    max_running_requests: int
    draining: bool
    generates: bool = True
    """Whether it takes `Generate`; a model without a head takes `Embed` alone."""


class File(Message, frozen=True):
    """A part of a file; `size` is the whole file's."""

    name: str
    offset: int
    size: int
    content: bytes


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request. `reason` is a `mizzen.core.request.FinishReason`."""

    rid: int
    reason: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop_token: int | None = None
    message: str = ""
    first_token_seconds: float = 0.0
    """From its arrival in the engine to its first token, by the engine's clock; 0 without one."""
    at_fault: bool = False
    """The request itself made it end in error: no engine is to blame, and none is to try again."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a row's tokens: n tokens, m entries each.

    A token's first entry is the token itself, then come the most probable ones, then those asked for by id.
    """

    rid: int
    width: int
    """m."""
    ids: bytes
    """int32 [n, m]."""
    values: bytes
    """float32 [n, m]: natural logarithms after temperature-free softmax of the processed logits."""
    prompt: bool = False
    """Of the prompt's tokens from the second on, not of the output's."""


class Outputs(Message, frozen=True):
    """All that one step gave the requests of one gateway, as columns; one row a request.

    `counts` is empty when every row has exactly one token.
    """

    step: int
    rids: bytes
    """uint32 [rows]."""
    offsets: bytes
    """uint32 [rows]: index of the row's first token within its request's output."""
    tokens: bytes
    """int32 [sum of counts]."""
    counts: bytes
    """uint16 [rows], or empty."""
    finished: tuple[Finish, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """Of those rows that asked for them."""


class Embedding(Message, frozen=True):
    """The answer to `Embed`; it frees the handle."""

    rid: int
    vector: bytes
    """float32 [hidden size]."""
    prompt_tokens: int
    cached_tokens: int


class RefusalCode(enum.IntEnum):
    """Why an engine did not take a request. The numbers are part of the protocol."""

    DRAINING = 1
    """Try another engine."""
    QUEUE_FULL = 2
    """Try another engine, or later."""
    QUEUE_TIMEOUT = 3
    """Waited `queue_seconds` without a first token."""
    INVALID = 4
    """Would be refused everywhere: `message` names the field."""
    STARTING = 5
    """Try another engine."""
    UNKNOWN_PEER = 6
    """This connection said no `Hello`, or was forgotten: every handle on it is lost; say `Hello` again."""
    BUSY = 7
    """Too many requests of this one's tenant and kind are there: try another engine, or later."""


class Refused(Message, frozen=True):
    """A request, or a frame that could not be read (`rid` is then None), is refused."""

    rid: int | None
    code: int
    message: str
    retry_after_seconds: float = 0.0


class Stats(Message, frozen=True):
    """How busy the engine is."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_total: int
    pages_used: int
    pages_cached: int
    draining: bool
    steps: int
    patience_seconds: float = 0.0
    """After so long without a step it hangs, by what its steps took so far; 0: it cannot say."""


class Blocks(Message, frozen=True):
    """Changes of the prefix cache: 64-bit names of `mizzen.core.kv.block_hashes`, uint64 columns.

    `sequence` counts from 0 for a peer and grows by one; after a gap, or with `reset`, what was known is void
    and `stored` holds all that the cache holds.
    """

    sequence: int
    stored: bytes
    evicted: bytes
    reset: bool = False


ToEngine = Hello | Generate | Embed | Abort | FetchFile
ToGateway = Welcome | File | Outputs | Embedding | Refused | Stats | Blocks
