"""Which output form a chat request asks for: tools and reasoning."""

from __future__ import annotations

from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.output import OutputForm
from mizzen.gateway.openai.schemas import ChatRequest


def output_form(request: ChatRequest) -> OutputForm | None:
    """Return what tools and reasoning options of a request mean; None when there are none.

    Raises:
        ApiError: 400, which names the field.
    """
    if request.tools and request.tool_choice != "none":
        raise invalid("tools is not served yet (leave it out)", "tools", "unsupported_parameter")
    if request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice needs tools", "tool_choice")
    return None
