"""From a grammar's text to what matches it, with xgrammar. Runs where it may take long: see `tryout`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xgrammar

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.ebnf import json_rules
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.follow_sets import followed
from mizzen.engine.grammar.patterns import check_pattern, one_line
from mizzen.engine.grammar.schema_support import check_schema, read_json
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
"""RFC 8259 without blanks, beginning with an object."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that grammars are compiled for."""

    folder: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Builder:
    """Compiles grammars for one model. Used from one thread at a time."""

    def __init__(self, target: Target, *, threads: int, nesting: int) -> None:
        """Read the model's vocabulary.

        Raises:
            GrammarError: the folder has no tokenizer that can be used.
        """
        tokens = read_vocabulary(Path(target.folder), target.vocab_size)
        self._target = target
        self._nesting = nesting
        self._text = self._compiler(tokens, threads)
        # In JSON without blanks no control character stands anywhere, and not all rules of it see to that.
        printable = [b"" if any(byte < 0x20 for byte in token) else token for token in tokens]
        self._json = self._compiler(printable, threads)

    def _compiler(self, tokens: list[bytes], threads: int) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=self._target.vocab_size,
            stop_token_ids=list(self._target.end_token_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    def compile(self, grammar: Grammar, *, tried: str | None = None) -> xgrammar.CompiledGrammar:
        """Compile a grammar.

        With `tried` it came through `try_out`, which returned that: its text is not looked at again, nor what
        follows its rules. That may take long, and (unlike the compiler) with the interpreter's lock held.

        Raises:
            GrammarError: it is wrong, or asks for what is not enforced; says what.
        """
        if tried is None:
            return self.try_out(grammar)[0]

        def work() -> xgrammar.CompiledGrammar:
            read = self._read(grammar.kind, grammar.text) if not tried else None
            return self._compile(grammar.kind, read, tried)

        return self._named(grammar, work)

    def try_out(self, grammar: Grammar) -> tuple[xgrammar.CompiledGrammar, str]:
        """Check and compile a grammar; return also its rules as they were compiled, where they were changed.

        Raises:
            GrammarError: as `compile`.
        """

        def work() -> tuple[xgrammar.CompiledGrammar, str]:
            self._check(grammar.kind, grammar.text)
            read = self._read(grammar.kind, grammar.text)
            tried = followed(read)
            return self._compile(grammar.kind, read, tried), tried

        return self._named(grammar, work)

    def _named(self, grammar: Grammar, work: Callable[[], R]) -> R:
        """Do the work; what goes wrong is said of the grammar."""
        try:
            return work()
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _PLACE.sub("", str(error).strip().split("\n")[0])
            raise GrammarError(f"the {grammar.kind} cannot be used: {reason[:500]}") from None

    def _check(self, kind: GrammarKind, text: str) -> None:
        """Refuse what the compiler would read otherwise than it is meant, or would not enforce.

        Raises:
            GrammarError: says what.
        """
        if kind is GrammarKind.JSON_SCHEMA:
            check_schema(read_json(text, self._nesting))
        elif kind is GrammarKind.REGEX:
            try:
                check_pattern(text, quoted=False)
            except GrammarError as error:
                raise GrammarError(f"the regex {error}") from None
        elif kind is GrammarKind.STRUCTURAL_TAG:
            for schema in schemas_of(read_json(text, self._nesting)):
                check_schema(schema)

    def _compile(
        self, kind: GrammarKind, read: xgrammar.Grammar | None, changed: str
    ) -> xgrammar.CompiledGrammar:
        """Compile rules: those that were changed, or where there are none those that were read."""
        of_json = kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
        rules = read if read is not None and not changed else xgrammar.Grammar.deserialize_json(changed)
        return (self._json if of_json else self._text).compile_grammar(rules)

    def _read(self, kind: GrammarKind, text: str) -> xgrammar.Grammar:
        if kind is GrammarKind.JSON_OBJECT:
            return xgrammar.Grammar.from_ebnf(JSON_OBJECT)
        if kind is GrammarKind.JSON_SCHEMA:
            return xgrammar.Grammar.from_ebnf(json_rules(text))
        if kind is GrammarKind.REGEX:
            return xgrammar.Grammar.from_regex(one_line(text))
        if kind is GrammarKind.EBNF:
            return xgrammar.Grammar.from_ebnf(text)
        tag = read_json(text, self._nesting)
        return xgrammar.Grammar.from_structural_tag(json.dumps(compact(bounded_strings(tag))))


def schemas_of(tag: Any) -> list[Any]:
    """Return the schemas that the parts of a structural tag conform to."""
    if isinstance(tag, list):
        return [schema for part in tag for schema in schemas_of(part)]
    if not isinstance(tag, dict):
        return []
    if "json_schema" in tag:
        return [tag["json_schema"]]
    return [schema for part in tag.values() for schema in schemas_of(part)]


def compact(tag: Any) -> Any:
    """Return a structural tag with the rules of those schemas that allow no blanks.

    The compiler knows 1 as the least `max_whitespace_cnt`; here 0 stands for JSON with plain separators.
    """
    if isinstance(tag, list):
        return [compact(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    plain = tag.get("type") == "json_schema" and tag.get("style", "json") == "json"
    if not plain or tag.get("max_whitespace_cnt") != 0 or "json_schema" not in tag:
        return {key: compact(part) for key, part in tag.items()}
    return {"type": "grammar", "grammar": json_rules(json.dumps(tag["json_schema"]))}


def bounded_strings(tag: Any) -> Any:
    """Return a structural tag whose schemas bound the lengths of strings by patterns.

    Rules with lengths let control characters through, which blanks between tokens of JSON need here.
    """
    if isinstance(tag, list):
        return [bounded_strings(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    tag = {key: bounded_strings(part) for key, part in tag.items()}
    low, high = tag.get("minLength", 0), tag.get("maxLength")
    lengths = "minLength" in tag or "maxLength" in tag
    if tag.get("type") != "string" or not lengths or "pattern" in tag or "format" in tag:
        return tag
    if not isinstance(low, int) or not (high is None or isinstance(high, int)) or max(low, high or 0) > 128:
        return tag
    kept = {key: part for key, part in tag.items() if key not in ("minLength", "maxLength")}
    return kept | {"pattern": rf'^[^\x00-\x1f"\\]{{{low},{"" if high is None else high}}}$'}
