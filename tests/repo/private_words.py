# SPDX-License-Identifier: Apache-2.0
"""Words that the repository must not use, because the field has established terms for them.

The kind of an entry says where the test looks for the word: in parts of identifiers, ignoring case (`word`),
in whole identifiers (`name`), in names of modules (`module`), or in prose (`phrase`): comments, strings,
names of tests, and files that are not code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WORKER, OPERATOR = ("worker",), ("operator",)
PRODUCT = (*WORKER, *OPERATOR)
GATEWAY = ("worker/mizzen/gateway",)
ENGINE = tuple(
    f"worker/mizzen/{name}" for name in ("core", "engine", "attention", "kernels", "layers", "models")
)
KERNELS = ("worker/mizzen/kernels", "worker/mizzen/layers")


@dataclass(frozen=True, slots=True)
class Private:
    """A word that must not be used, the term to use instead, and where the test looks for the word."""

    label: str
    kind: str
    """Where the test looks for the word: `word`, `name`, `module` or `phrase`; see the module's docstring."""
    pattern: re.Pattern[str]
    instead: str
    scope: tuple[str, ...] = ()
    """Folders in which the word must not occur; empty for the whole repository."""


def _words(rows: str, kind: str, scope: tuple[str, ...] = ()) -> list[Private]:
    """Parse a table with one word per line: a regular expression, a colon, and the term to use instead."""
    entries = []
    for row in filter(None, map(str.strip, rows.splitlines())):
        pattern, _, instead = (cell.strip() for cell in row.partition(" : "))
        label = re.sub(r"\\[bs]\+?|\(\?[:!][^)]*\)|[?\\]", "", pattern) if kind != "phrase" else pattern
        phrase = kind == "phrase"
        compiled = re.compile(
            pattern.replace(" ", r"\s+") if phrase else pattern, re.IGNORECASE if phrase else 0
        )
        entries.append(Private(f"{label} ({kind})", kind, compiled, instead, scope))
    return entries


PRIVATE: list[Private] = [
    *_words(
        """
        wish|wishes : generation request
        untaken : unread output, backpressure
        unheard : raw HTTP errors
        gathered : admin fan-out
        suspicion : health check
        obituary : exit reason
        hindrances : unsupported_reasons
        skinny : small-M GEMM
        uneven : length-aware splits
        roomless : without peer memory
        redraws? : resample
        penalized : graph penalties
        seizes? : allocate
        adopts? : dedupe
        surrenders? : prepare_free
        promised : reclaimable
        deposits? : insert_and_unlock
        asks|asked : params, request, query
        told|telling|tell : report, notify
        looked : check, reconcile
        blame : failed rank
        tally : counters
        beat : ping, heartbeat
        news : table watch
        bystander : degraded
        entrances? : gateway reconciler
        rehearsal : dry run
        aside : low priority
        strayed|strays : drifted
        robbed : incomplete
        gangs? : multi-pod group
        strangers? : protocol mismatch
        facts : status inputs
        """,
        "word",
    ),
    *_words(
        """
        ticket|tickets : admission entry
        awake : clock gaps
        pulse|pulses : heartbeat
        spread|spreads : histogram
        rooms : layers, packages
        draft : plan builder
        land|landed : complete
        pays|paying : is faster
        projected : fused QKV-prep
        onto : add into residual
        cells : slot mapping, page table entries
        heard : synced, received
        """,
        "word",
        WORKER,
    ),
    *_words("job : routed request", "word", GATEWAY),
    *_words("gates : gate-up", "word", (*KERNELS, "worker/mizzen/models", "worker/mizzen/engine")),
    *_words(
        "wide|widest : swap-AB\n cut|cuts : tile config\n gated : gate-up SwiGLU\n late : PDL",
        "word",
        KERNELS,
    ),
    *_words(
        """
        look|looks : reconcile
        ear : watch
        lane|lanes : flow
        unread : degraded, invalid
        standing : read-only
        sweep : metadata poller
        heard : synced
        doubt : invalidate
        rests|resting : back-off
        recall|learn : load, update
        trouble : container state
        subject : service reference
        """,
        "word",
        ("operator/mizzen_operator",),
    ),
    *_words(
        """
        leave_alone : back_off
        leave_words : exit reason
        NOBODY : DEFAULT_TENANT
        _?Alone : SingleRank
        Spread : Histogram
        _?Turns : FairMutex, fair queue
        Found : DiscoveredEngine
        Known : CachedPrefix, PreviousResult
        DeviceSide : SideOutputs
        agreed_tokens : synced last tokens
        MergedLinear : MergedColumnParallelLinear
        InputSplitLinear : RowParallelLinear
        Pace : PrefillBudget
        SlotAsks : logits params
        """,
        "name",
    ),
    *_words(
        r"""
        look|looks : check, peek
        everyone : default tenant
        (?!\w*([Ii]n_?[Ff]light|IN_FLIGHT))\w*flight\w* : in-flight step
        """,
        "name",
        WORKER,
    ),
    *_words(
        """
        Seen|_?Steps|_?Traffic|_Collection|Children|Where|Need|Fit|Place|GivenUp : see the glossary
        Held|Memory|Wanted : see the glossary
        Outcome|Acknowledgements|Answer|Front|Sharing|Start|Trial : see the glossary
        see_off|_see_off|stand_by|_stand_by : reconcile_deleting, reconcile_degraded
        _?incarnations? : attempt
        """,
        "name",
        ("operator/mizzen_operator",),
    ),
    *_words(
        """
        wish|job|running|ticket|tickets|gathered|tally|siblings|untaken : see the trees
        unheard|suspicion|beat|news : see the trees
        asks|redraws|penalized|side|uneven|refusals|choices|parts|place|machine|probe : see the trees
        draft|flight|pace|names : see the trees
        skinny|wide|wide_cuts|gated|tensor_cores|paged|ragged|rooms : see the trees
        awake|blame|ends|pulse|catalogue : see the trees
        """,
        "module",
        WORKER,
    ),
    *_words(
        """
        entrance|front|standing|labelled|listen|follow|session|sweep : see the tree
        starts|ends|trouble|rehearsal : see the tree
        lead|turns|needs|fit|unread|facts|subject|look|step|execute|memory|failure|loop : see the tree
        """,
        "module",
        ("operator/mizzen_operator",),
    ),
    *_words(
        r"""
        \bof which\b : whose, its
        \bwhom(ever)?\b : name who
        \bthose that\b : name them
        \bthose (who|whose)\b : name them
        \banew\b : again
        \b(is|are|was|were) (?-i:none)\b : is not a, returns None
        \b(is|are|was) no more\b(?! than) : no longer
        \bnobody\b : no client, no process
        \btold\b : name subject and object
        \btells? of\b : reports
        \bas well as the worst\b : including
        \bwhose (they are|it is)\b : owner
        \bwhat is there\b : existing
        \bno sooner\b : not before
        \bis another one\b : differs
        \bempty without\b : empty if none
        \bso many\b : name the number
        \bas many as (there|they) are\b : name the number
        , for (it|they|there|nobody|nothing|whoever|neither|otherwise|this|that|these)\b : because
        \bwhoever\b : name who
        \bis (theirs|its own|ours)\b : belongs to
        \bnor (is|are|does|do|has|have)\b : and is not
        \bin (its|the|their) place of\b : instead of
        \bcopy engine\b : TMA
        \bmultiprocessors?\b : SM
        \bgangs?\b : multi-pod group
        \bstrangers?\b : another protocol version
        \bwish(es)?\b : request
        \buntaken\b : unread
        \bunheard\b : unanswered
        \bredraws?\b : resample
        \brehears(al|es?|ed)\b : dry run
        \bfor want of\b : because ... is missing
        \bone that is none\b : padding
        """,
        "phrase",
    ),
]


INFORMATION: tuple[str, ...] = (
    "one",
    "found",
    "made",
    "given",
    "known",
    "held",
    "whole",
    "take",
    "share",
    "part",
    "room",
)
"""Words that are too common in identifiers to be violations; only the number of their uses is shown."""
