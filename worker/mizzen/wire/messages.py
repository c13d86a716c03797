"""The wire protocol: messages between gateways and engines.

A gateway opens one DEALER socket per engine; the engine binds one ROUTER. Each ZMQ message is one frame: a
msgpack array whose first element is the message's tag. The gateway chooses handles (`rid`), which are unique
on its connection while the request is live. Packed integer columns are little-endian `bytes`.

    gateway ──Hello──▶ engine ──Welcome──▶ gateway            first, and again after a reconnect
    gateway ──FetchFile──▶ engine ──File──▶ gateway           tokenizer and configuration files, in parts
    gateway ──Generate / Abort──▶ engine ──Outputs / Refused──▶ gateway
    gateway ──Embed──▶ engine ──Embedding / Refused──▶ gateway
    engine ──Stats / Blocks──▶ gateway                        on change, Stats at least once a second

An `Abort` is always answered by a `Finish` in an `Outputs` frame (unless one was already on its way), so both
sides agree on when a handle is free. A `Refused` frees its handle too.

A connection starts with `Hello`, and each further `Hello` restarts it: the engine aborts the connection's
live requests, all handles become free, and `Blocks.sequence` restarts at 0. Any other frame before a `Hello`
is rejected with `RefusalCode.UNKNOWN_PEER`. An engine drops a connection that does not accept its frames (its
queue is full; ZMQ drops frames at the high-water mark) or does not answer heartbeats. It then sends
`Refused(None, UNKNOWN_PEER)` as soon as possible, and the gateway treats all its handles as lost and sends
`Hello`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from mizzen.core.sampling_params import PARAMETERS

PROTOCOL = 2
"""Version of the protocol, incremented with every incompatible change; both sides reject any other
version."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
FILE_PART_BYTES = 4 * 1024 * 1024
MAX_GRAMMAR_BYTES = 512 * 1024
"""Maximum size of the text of `Sampling.grammar`; a frame longer than any request ends its connection."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of all messages; the class name is the tag."""


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
    """Registers a gateway with an engine."""

    protocol: int
    gateway: str


class Generate(Message, frozen=True):
    """Requests the continuation of a prompt."""

    rid: int
    prompt: bytes
    """int32 token ids."""
    sampling: Sampling
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0
    """Maximum time in the engine's queue before the request is rejected; 0 means no limit."""
    generated: int = 0
    """Number of trailing tokens of `prompt` that are output of a lost engine: limits, penalties and the
    grammar count them as output, and `Outputs.offsets` continue after them."""
    tenant: int = 0
    """Opaque tenant number; the engine prevents requests of one tenant from starving those of others."""


class Embed(Message, frozen=True):
    """Requests one vector of a prompt's last hidden states (after the final norm)."""

    rid: int
    prompt: bytes
    """int32 token ids."""
    pooling: str = "last"
    """Pooling: `last` (hidden state of the last token) or `mean` (over all tokens)."""
    normalize: bool = True
    """Whether the vector is scaled to length 1."""
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0


class Abort(Message, frozen=True):
    """Aborts a request."""

    rid: int


class FetchFile(Message, frozen=True):
    """Requests a part of a file named in `Welcome.files`, from a byte offset.

    An engine queues a few such requests per gateway (`WireLimits.file_asks`) and rejects more with
    `RefusalCode.QUEUE_FULL`.
    """

    name: str
    offset: int = 0
    """Byte offset; a multiple of FILE_PART_BYTES."""


class Welcome(Message, frozen=True):
    """Describes an engine to a gateway."""

    protocol: int
    engine: str
    """Name of the engine; on Kubernetes, of its pod."""
    incarnation: str
    """Random identifier of this start of the engine; with a new one, all earlier state is void."""
    revision: str
    model: str
    """Served model name."""
    tokenizer_hash: str
    """Hash of `files`; engines with equal hashes tokenize and render identically."""
    files: dict[str, int]
    """Size in bytes of the tokenizer and configuration files that `FetchFile` serves, by name."""
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    """Token ids that end a request unless `ignore_eos` is set."""
    page_size: int
    max_running_requests: int
    draining: bool
    generates: bool = True
    """Whether the engine accepts `Generate`; a model without a language-model head accepts only `Embed`."""


class File(Message, frozen=True):
    """A part of a file; `size` is the size of the complete file."""

    name: str
    offset: int
    size: int
    content: bytes


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The result of a finished request. `reason` is a `mizzen.core.request.FinishReason`."""

    rid: int
    reason: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop_token: int | None = None
    message: str = ""
    first_token_seconds: float = 0.0
    """Seconds from arrival in the engine to the first token, by the engine's clock; 0 without a token."""
    at_fault: bool = False
    """Whether the request itself causes the error; then no engine is at fault and none should retry."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a row's tokens: n tokens, m entries each.

    The first entry of a token is the token itself; the most probable tokens follow, then those requested by
    id.
    """

    rid: int
    width: int
    """Number of entries per token, m."""
    ids: bytes
    """int32 [n, m]."""
    values: bytes
    """float32 [n, m]: natural logarithms after temperature-free softmax of the processed logits."""
    prompt: bool = False
    """Whether the tokens are the prompt's, from the second on, instead of the output's."""


class Outputs(Message, frozen=True):
    """Outputs of one step for the requests of one gateway, as columns; one row per request.

    `counts` is empty if every row has exactly one token.
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
    """Log probabilities of the rows that requested them."""


class Embedding(Message, frozen=True):
    """The result of an `Embed`; it frees the handle."""

    rid: int
    vector: bytes
    """float32 [hidden size]."""
    prompt_tokens: int
    cached_tokens: int


class RefusalCode(enum.IntEnum):
    """Reason why an engine rejected a request. The numbers are part of the protocol."""

    DRAINING = 1
    """Try another engine."""
    QUEUE_FULL = 2
    """Try another engine, or later."""
    QUEUE_TIMEOUT = 3
    """The request waited `queue_seconds` without a first token."""
    INVALID = 4
    """Every engine would reject the request: `message` names the field."""
    STARTING = 5
    """Try another engine."""
    UNKNOWN_PEER = 6
    """The connection sent no `Hello`, or was dropped: every handle on it is lost; send `Hello` again."""
    BUSY = 7
    """The tenant has too many requests of this kind: try another engine, or later."""


class Refused(Message, frozen=True):
    """Rejects a request, or a frame that could not be decoded (then `rid` is None)."""

    rid: int | None
    code: int
    message: str
    retry_after_seconds: float = 0.0


class Stats(Message, frozen=True):
    """Load of the engine."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_total: int
    pages_used: int
    pages_cached: int
    draining: bool
    steps: int
    patience_seconds: float = 0.0
    """Seconds without a completed step after which the engine hangs, judged by its past steps; 0 if
    unknown."""


class Blocks(Message, frozen=True):
    """Changes of the prefix cache: 64-bit hashes of `mizzen.core.kv.block_hashes`, uint64 columns.

    `sequence` counts from 0 per peer. After a gap, or with `reset`, earlier knowledge is void and `stored`
    contains all cached blocks.
    """

    sequence: int
    stored: bytes
    evicted: bytes
    reset: bool = False


ToEngine = Hello | Generate | Embed | Abort | FetchFile
ToGateway = Welcome | File | Outputs | Embedding | Refused | Stats | Blocks
