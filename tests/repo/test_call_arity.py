# SPDX-License-Identifier: Apache-2.0
"""Calls in the operator have at most five positional arguments; further arguments are passed by keyword."""

from __future__ import annotations

import ast
from collections import Counter

from ratchets import ROOT, check, tracked

from source_code import parse_source

MOST = 5
VARIADIC = {"_run_go", "kubectl", "logger.info"}
"""Functions whose positional arguments are a list: words of a command, or values of a log message."""


def test_calls_of_the_operator_name_their_arguments() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path in tracked(".py"):
        if path.parts[0] != "operator":
            continue
        for node in ast.walk(parse_source((ROOT / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            name = ast.unparse(node.func)
            if positional > MOST and name not in VARIADIC:
                counts[name] += 1
                places.append(f"{path}:{node.lineno} {name}: {positional} positional arguments")
    check("call_arity", counts, places)
