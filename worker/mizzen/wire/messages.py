# SPDX-License-Identifier: Apache-2.0
"""The wire protocol: messages between gateways and engines.

A gateway opens one DEALER socket per engine; the engine binds one ROUTER. Each ZMQ message is one frame: a
msgpack array whose first element is the message's tag. The gateway chooses handles (`rid`), which are unique
on its connection while the request is live. Packed integer columns are little-endian `bytes`.

    gateway ──Hello──▶ engine ──Welcome──▶ gateway            first, and again after a reconnect
    gateway ──FetchFile──▶ engine ──File──▶ gateway           tokenizer and configuration files, in parts
    gateway ──Generate / Abort──▶ engine ──Outputs / Refused──▶ gateway
    engine ──NeedImages──▶ gateway ──ImageContent──▶ engine   images of a request that the engine lacks
    gateway ──Embed──▶ engine ──Embedding / Refused──▶ gateway
    engine ──Stats / Blocks──▶ gateway                        on change, Stats at least once a second

The engine ends every accepted request, aborted ones included, with one `Finish` in an `Outputs` frame, one
`Embedding` or one `Refused`. Any of these frees the handle, so both sides agree on when a handle is free.

`Generate` names images of a prompt by digests. The engine requests the bytes of images that it has neither
cached nor received, once even if several requests need the same image. The gateway sends them in order, in
parts of at most `FILE_PART_BYTES`, and again for each request of the engine; other frames may come between
them. It ignores unknown digests and handles. The engine ignores parts for handles that are not in use. A part
that was not requested or is not the next one ends its request with an error at fault; if the next part does
not arrive in time, the request ends with an error that is not at fault.

A connection starts with `Hello`, and each further `Hello` restarts it: the engine aborts the connection's
live requests, all handles become free, and `Blocks.sequence` restarts at 0. Any other frame before a `Hello`
is rejected with `RefusalCode.UNKNOWN_PEER`. An engine drops a gateway that does not answer heartbeats, or
whose ZMQ queue is full because it does not read its frames. A gateway with a full queue is sent
`Refused(None, UNKNOWN_PEER)` as soon as the queue has room; it then treats all handles of the connection as
lost and sends `Hello`.

Each release speaks two versions of the protocol: its own, and that of the release before. `Hello` names the
versions that the gateway speaks, and `Welcome` the newest one that both sides speak; the connection uses this
one (`mizzen.wire.protocol_versions`). Three rules keep releases compatible:

- A message gets new fields only at its end, and with defaults. A decoder ignores fields that it does not know
  and uses the defaults of missing ones, so such fields need no new version.
- New messages, new codes and everything else that an older decoder would reject or misunderstand belong to a
  new version, and are sent only on connections that use this version.
- Nothing is removed or changes its meaning before the release that no longer speaks the old version.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec

from mizzen.common.model_task import Task
from mizzen.core.sampling_params import PARAMETERS

PROTOCOL = 3
"""Newest version of the protocol, incremented with incompatible changes, at most once in a release. Since
version 3, `Hello` names a range of versions."""
OLDEST_PROTOCOL = PROTOCOL - 1
"""Oldest version that this release speaks: that of the release before."""

IMAGES_PROTOCOL = 3
"""Oldest version with images in requests."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
FILE_PART_BYTES = 4 * 1024 * 1024
IMAGE_PART_BYTES = 512 * 1024
"""Size of the parts in which gateways send images. They are smaller than `FILE_PART_BYTES`, because frames of
other requests wait behind a part while it is encrypted and sent."""
MAX_IMAGES = 1024
"""Maximum number of images of a request; gateways have lower limits by default."""
MAX_IMAGE_BYTES = 256 * 1024 * 1024
"""Maximum size of an image file."""
MAX_REQUEST_IMAGE_BYTES = 1024 * 1024 * 1024
"""Maximum size of all image files of a request together."""
MAX_GRAMMAR_BYTES = 512 * 1024
"""Maximum size of the text of `Sampling.grammar`. The engine derives its maximum frame size from it; a longer
frame ends the connection."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of all messages; the name of a message's class is its tag."""


if TYPE_CHECKING:

    class Sampling(msgspec.Struct, frozen=True):
        """Sampling parameters of a request: the fields of `SamplingParams` that gateways send to engines."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    # Encoded as an array of the parameters, in the order in which `SamplingParams` declares them.
    Sampling = msgspec.defstruct(
        "Sampling",
        [(entry.name, entry.wire_type, entry.default) for entry in PARAMETERS if entry.sent],
        frozen=True,
        array_like=True,
        module=__name__,
    )


class Hello(WireMessage, frozen=True):
    """Registers a gateway with an engine."""

    protocol: int
    """Oldest version of the protocol that the gateway speaks. An engine that speaks only version 2 knows no
    other field, and compares this one with its own version."""
    gateway: str
    newest_protocol: int = 0
    """Newest version that the gateway speaks; 0 if it speaks only `protocol`."""


class ImageReference(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt. Its bytes are sent only if the engine asks for them with `NeedImages`."""

    digest: bytes
    """Digest of the bytes, the rules of the model and the bounds below (`mizzen.images.digest`)."""
    positions: bytes
    """Indices of the placeholders in the prompt, in order, int32 [embeddings]."""
    size: int
    """Number of bytes of the image file."""
    width: int
    """Width in pixels as displayed, according to the header of the file."""
    height: int
    min_pixels: int | None = None
    """Bounds of the number of pixels after resizing, if the request sets them."""
    max_pixels: int | None = None


class Generate(WireMessage, frozen=True):
    """Requests the continuation of a prompt."""

    rid: int
    prompt: bytes
    """Token ids of the prompt, int32 [tokens]."""
    sampling: Sampling
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0
    """Seconds after which the request is rejected if it has no first token yet; 0 means no limit."""
    generated: int = 0
    """Number of trailing tokens of `prompt` that another engine generated before it was lost: limits,
    penalties and the grammar treat them as output, and `Outputs.offsets` continue after them."""
    tenant: int = 0
    """Opaque number of the tenant; the engine keeps one tenant's requests from starving those of others."""
    traceparent: str = ""
    """W3C trace context of the gateway's span for this request, if the trace is sampled; else empty. Engines
    ignore a malformed one."""
    images: tuple[ImageReference, ...] = ()
    """Images of the prompt, in order; sent only to engines with `Welcome.images`."""


class Embed(WireMessage, frozen=True):
    """Requests the embedding of a prompt: one vector, pooled from the hidden states after the final norm, or
    the logits that a classifier computes from this vector."""

    rid: int
    prompt: bytes
    """Token ids of the prompt, int32 [tokens]."""
    pooling: str = "last"
    """Pooling method: `last` (hidden state of the last token), `mean` (mean over all tokens) or `cls` (hidden
    state of the first token)."""
    normalize: bool = True
    """Whether the vector is scaled to length 1."""
    salt: bytes = b""
    priority: int = 0
    queue_seconds: float = 0.0
    traceparent: str = ""
    """As in `Generate`."""
    classify: bool = False
    """Whether the vector has the logits of a classifier's labels, to which no activation is applied, instead
    of the embedding; the model's own pooling is then used, and `normalize` has no effect."""
    second_start: int = 0
    """Index of the first token of the second part of a pair, from which token types are 1; 0 without one."""


class Abort(WireMessage, frozen=True):
    """Aborts a live request; the engine still ends it with a `Finish`."""

    rid: int


class ImageContent(WireMessage, frozen=True):
    """Part of an image file that the engine asked for, from byte `offset`; parts are sent in order."""

    rid: int
    """Handle of the request for which the engine asked."""
    digest: bytes
    offset: int
    content: bytes
    """At most `FILE_PART_BYTES` bytes."""


class FetchFile(WireMessage, frozen=True):
    """Requests the part of a file that starts at a byte offset; the file's name is a key of `Welcome.files`.

    An engine queues a few of these requests per gateway (`WireLimits.file_requests`) and rejects further ones
    with `RefusalCode.QUEUE_FULL`.
    """

    name: str
    offset: int = 0
    """Byte offset of the part; a multiple of `FILE_PART_BYTES`."""


class Welcome(WireMessage, frozen=True):
    """Describes an engine to a gateway."""

    protocol: int
    """Version of the protocol that this connection uses: the newest one that both sides speak."""
    engine: str
    """Name of the engine; on Kubernetes, the name of its pod."""
    incarnation: str
    """Random identifier of this start of the engine; a new value means that all earlier state is gone."""
    revision: str
    model: str
    """Name under which the model is served."""
    tokenizer_hash: str
    """Hash of the tokenizer and chat template files; engines with equal hashes tokenize and render alike."""
    files: dict[str, int]
    """Sizes in bytes, by name, of the tokenizer and configuration files that `FetchFile` can request."""
    context_length: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    """Token ids that end a request unless `Sampling.ignore_eos` is set."""
    page_size: int
    max_running_requests: int
    draining: bool
    generates: bool = True
    """Whether the engine accepts `Generate`; a model without a language-model head accepts only `Embed`."""
    quantization: str = ""
    """Description of quantized weights, such as "AWQ: 4-bit integers, groups of 128"; empty for others."""
    task: str = ""
    """Task of the model, a value of `mizzen.common.model_task.Task`; empty if the engine is of a release that
    does not send it (see `served_task`)."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, by index."""
    score_activation: str = ""
    """Default activation of a classifier's logits, a value of `mizzen.common.model_task.ScoreActivation`."""
    pooling: str = ""
    """Pooling of the model: that of its files, or else the default of its architecture. Empty for the last
    token by default; may be the name of one that is not supported."""
    expert_groups: int = 0
    """Number of groups of ranks that hold different experts of a mixture; 0 for other models."""
    images: bool = False
    """Whether the engine accepts `Generate.images`."""

    @property
    def served_task(self) -> Task:
        """Task of the model. An engine that does not send it embeds if it does not generate.

        A task that this release does not know counts as `EMBED`.
        """
        if self.task in list(Task):
            return Task(self.task)
        return Task.GENERATE if self.generates else Task.EMBED


class NeedImages(WireMessage, frozen=True):
    """Asks for the bytes of images of a live request, which the engine has neither cached nor received."""

    rid: int
    digests: tuple[bytes, ...]


class File(WireMessage, frozen=True):
    """Part of a file, from byte `offset`; `size` is the size of the complete file in bytes."""

    name: str
    offset: int
    size: int
    content: bytes


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """Result of a finished request; `reason` is a `mizzen.core.request.FinishReason`."""

    rid: int
    reason: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop_token: int | None = None
    message: str = ""
    first_token_seconds: float = 0.0
    """Seconds from the request's arrival in the engine to its first token; 0 if no token was generated."""
    at_fault: bool = False
    """Whether the request itself caused the error, so that sending it to another engine would not help."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities for n tokens of one request, with m entries per token.

    The first entry of a token is the token itself; the most probable tokens follow, then the tokens that were
    requested by id.
    """

    rid: int
    width: int
    """Number of entries per token, m."""
    ids: bytes
    """Token ids of the entries, int32 [n, m]."""
    values: bytes
    """Log probabilities of the entries, float32 [n, m]: natural logarithms of the softmax at temperature
    1."""
    prompt: bool = False
    """Whether the tokens belong to the prompt (from its second token on) instead of the output."""


class Outputs(WireMessage, frozen=True):
    """Outputs of one step for the requests of one gateway, as columns with one row per request."""

    step: int
    rids: bytes
    """Handles of the requests, uint32 [rows]."""
    offsets: bytes
    """Index of each row's first token within its request's output, uint32 [rows]."""
    tokens: bytes
    """Token ids of all rows, row after row, int32 [sum of counts]."""
    counts: bytes
    """Number of tokens per row, uint16 [rows]; empty if every row has exactly one token."""
    finished: tuple[Finish, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of the requests that asked for them."""


class Embedding(WireMessage, frozen=True):
    """Result of an `Embed`; it frees the handle."""

    rid: int
    vector: bytes
    """The embedding, float32 [size], or the logits of the labels, float32 [labels]."""
    prompt_tokens: int
    cached_tokens: int


class RefusalCode(enum.IntEnum):
    """Reason why an engine rejected a request. The numbers are part of the protocol."""

    DRAINING = 1
    """The engine is draining and accepts no new requests: try another engine."""
    QUEUE_FULL = 2
    """The engine's queue is full: try another engine, or try again later."""
    QUEUE_TIMEOUT = 3
    """The request waited for its first token longer than its `queue_seconds`."""
    INVALID = 4
    """Every engine would reject the request: `message` names the field."""
    STARTING = 5
    """The engine has not finished starting: try another engine."""
    UNKNOWN_PEER = 6
    """The connection sent no `Hello`, or was dropped: all its handles are lost; send `Hello` again."""
    BUSY = 7
    """The tenant has too many requests of this kind: try another engine, or try again later."""


class Refused(WireMessage, frozen=True):
    """Rejects a request or, if `rid` is None, a frame that does not belong to a request."""

    rid: int | None
    code: int
    message: str
    retry_after_seconds: float = 0.0


class Stats(WireMessage, frozen=True):
    """The engine's current load: the numbers of requests, of waiting prompt tokens and of KV cache pages."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_total: int
    pages_used: int
    pages_cached: int
    draining: bool
    steps: int
    patience_seconds: float = 0.0
    """Seconds without a completed step after which the engine counts as hung, estimated from the durations of
    past steps; 0 if unknown."""


class Blocks(WireMessage, frozen=True):
    """Changes of the engine's prefix cache, as block hashes (`mizzen.core.kv.block_hashes`), uint64 [blocks].

    `sequence` counts from 0 for each connection; a gap means that changes were lost, and the gateway must
    reconnect. If `reset` is set, `stored` is the complete cache and replaces everything known before.
    """

    sequence: int
    stored: bytes
    evicted: bytes
    reset: bool = False


ToEngine = Hello | Generate | Embed | Abort | FetchFile | ImageContent
ToGateway = Welcome | NeedImages | File | Outputs | Embedding | Refused | Stats | Blocks
