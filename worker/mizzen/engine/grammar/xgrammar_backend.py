# SPDX-License-Identifier: Apache-2.0
"""Compiles the text of a grammar with xgrammar.

Compilation may take long, so a grammar is first compiled on trial in a sandbox (`compile_sandbox`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xgrammar

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.follow_sets import add_lookaheads
from mizzen.engine.grammar.regex_rules import check_pattern, regex_to_ebnf
from mizzen.engine.grammar.schema_rules import json_schema_to_ebnf
from mizzen.engine.grammar.schema_support import check_schema, read_json
from mizzen.engine.grammar.tag_formats import check_formats, convert_formats
from mizzen.engine.grammar.vocabulary import read_vocabulary

JSON_OBJECT = r"""
root ::= object
object ::= "{" (member ("," member)*)? "}"
member ::= string ":" value
value ::= object | array | string | number | "true" | "false" | "null"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" rest
rest ::= [^\x00-\x1f"\\]* "\"" | [^\x00-\x1f"\\]* "\\" escape rest
escape ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
"""
"""EBNF rules of an RFC 8259 JSON object without whitespace."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarTarget:
    """The model that grammars are compiled for."""

    folder: str
    """Folder with the model's tokenizer.json."""
    vocab_size: int
    end_token_ids: tuple[int, ...]


class GrammarBuilder:
    """Compiles grammars for one model. Used from one thread at a time."""

    def __init__(self, target: GrammarTarget, *, threads: int, nesting: int) -> None:
        """Read the vocabulary of the model.

        Args:
            target: The model.
            threads: Number of threads that a compilation uses.
            nesting: Maximum depth of objects and lists in a schema or structural tag.

        Raises:
            GrammarError: The model has no usable tokenizer.json.
        """
        tokens = read_vocabulary(Path(target.folder), target.vocab_size)
        self._target = target
        self._nesting = nesting
        self._compiler = self._make_compiler(tokens, threads)

    def _make_compiler(self, tokens: list[bytes], threads: int) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self._target.vocab_size,
            stop_token_ids=list(self._target.end_token_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    def compile(self, grammar: Grammar, *, checked_rules: str | None = None) -> xgrammar.CompiledGrammar:
        """Compile a grammar.

        Args:
            grammar: The grammar.
            checked_rules: Rules that `check_and_compile` returned for this grammar. If given, checks and the
                computation of FOLLOW sets are skipped: they may take long and, unlike the compiler, hold the
                interpreter lock.

        Raises:
            GrammarError: The grammar is invalid, or contains something that would not be enforced. The
                message names the problem.
        """
        if checked_rules is None:
            return self.check_and_compile(grammar)[0]

        def work() -> xgrammar.CompiledGrammar:
            parsed = self._read(grammar.kind, grammar.text) if not checked_rules else None
            return self._compile(parsed, checked_rules)

        return self._with_named_errors(grammar, work)

    def check_and_compile(self, grammar: Grammar) -> tuple[xgrammar.CompiledGrammar, str]:
        """Check and compile a grammar.

        Returns:
            The compiled grammar, and its rules with lookaheads in xgrammar's JSON form (an empty string if no
            lookahead was added).

        Raises:
            GrammarError: The grammar is invalid, or contains something that would not be enforced. The
                message names the problem.
        """

        def work() -> tuple[xgrammar.CompiledGrammar, str]:
            self._check(grammar.kind, grammar.text)
            grammar_rules = self._read(grammar.kind, grammar.text)
            rules = add_lookaheads(grammar_rules)
            return self._compile(grammar_rules, rules), rules

        return self._with_named_errors(grammar, work)

    def _with_named_errors(self, grammar: Grammar, work: Callable[[], R]) -> R:
        """Call `work`; convert errors of the compiler to a GrammarError that names the kind of grammar."""
        try:
            return work()
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _PLACE.sub("", str(error).strip().split("\n")[0])
            raise GrammarError(f"the {grammar.kind} cannot be used: {reason[:500]}") from None

    def _check(self, kind: GrammarKind, text: str) -> None:
        """Reject the text of a grammar if the compiler would misread it or would not enforce all of it.

        Raises:
            GrammarError: The text is rejected; the message names the construct.
        """
        if kind is GrammarKind.JSON_SCHEMA:
            check_schema(read_json(text, self._nesting))
        elif kind is GrammarKind.REGEX:
            try:
                check_pattern(text, quoted=False)
            except GrammarError as error:
                raise GrammarError(f"the regex {error}") from None
        elif kind is GrammarKind.STRUCTURAL_TAG:
            check_formats(read_json(text, self._nesting))

    def _compile(self, parsed: xgrammar.Grammar | None, changed: str) -> xgrammar.CompiledGrammar:
        """Compile `changed` (rules in xgrammar's JSON form) if it is not empty, otherwise `parsed`."""
        rules = parsed if parsed is not None and not changed else xgrammar.Grammar.deserialize_json(changed)
        return self._compiler.compile_grammar(rules)

    def _read(self, kind: GrammarKind, text: str) -> xgrammar.Grammar:
        if kind is GrammarKind.JSON_OBJECT:
            return xgrammar.Grammar.from_ebnf(JSON_OBJECT)
        if kind is GrammarKind.JSON_SCHEMA:
            return xgrammar.Grammar.from_ebnf(json_schema_to_ebnf(read_json(text, self._nesting)))
        if kind is GrammarKind.REGEX:
            return xgrammar.Grammar.from_ebnf(regex_to_ebnf(text))
        if kind is GrammarKind.EBNF:
            return xgrammar.Grammar.from_ebnf(text)
        tag = convert_formats(read_json(text, self._nesting))
        return xgrammar.Grammar.from_structural_tag(json.dumps(tag))
