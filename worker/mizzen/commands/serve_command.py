# SPDX-License-Identifier: Apache-2.0
"""Commands that recognize the options of vLLM and SGLang, and say what to write instead."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from mizzen.common.foreign_options import FOREIGN_BY_NAME


class ServeCommand(TyperCommand):
    """Command that recognizes the options of other servers and says what to write instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises:
            UsageError: an option is unknown; the message has the option to use instead, if there is one.
        """
        foreign = next((name for name in map(_option_name, args) if self._is_foreign(name, ctx)), None)
        if foreign is not None:
            ctx.fail(f"No such option: {foreign}. In Mizzen: {FOREIGN_BY_NAME[foreign].instead}")
        return super().parse_args(ctx, args)

    def _is_foreign(self, name: str, ctx: Any) -> bool:
        own = (option for parameter in self.get_params(ctx) for option in parameter.opts)
        return name in FOREIGN_BY_NAME and name not in own


def _option_name(word: str) -> str:
    """Return the name of an option without its value and without a member.

    For example, `--tp` for `--tp=2`, and `--speculative-config` for `--speculative-config.method=ngram`.
    """
    return word.partition("=")[0].partition(".")[0]
