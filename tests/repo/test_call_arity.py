"""Calls of the operator have at most five positional arguments; more of them are passed by name."""

from __future__ import annotations

import ast
from collections import Counter

from ratchets import ROOT, check, tracked

MOST = 5


def test_calls_name_their_arguments() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path in tracked(".py"):
        if path.parts[0] != "operator":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            if positional > MOST:
                name = ast.unparse(node.func)
                counts[name] += 1
                places.append(f"{path}:{node.lineno} {name}: {positional} positional arguments")
    check("call_arity", counts, places)
