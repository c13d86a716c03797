# SPDX-License-Identifier: Apache-2.0
"""A model's text in a real browser: Markdown becomes elements, and nothing becomes script or markup."""

from __future__ import annotations

import time
from typing import Any

HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)> <svg onload=alert(3)>
[a](javascript:alert(4)) [b](data:text/html,<script>alert(5)</script>) [c](https://example.com/"onclick="alert(6))
![i](https://example.com/pixel.png) `<b>code</b>` **<i>bold</i>**

```html"><script>alert(7)</script>
<iframe src=javascript:alert(8)></iframe>
```

| <u>a</u> | b |
|---|---|
| <style>*{display:none}</style> | <a href=x>y</a> |
"""
RENDERED = [
    ("# One\n## Two ##", "<h2>One</h2><h3>Two</h3>"),
    (
        "a **b** *c* ~~d~~ `e*f*`",
        '<p class="line">a <strong>b</strong> <em>c</em> <s>d</s> <code>e*f*</code></p>',
    ),
    ("2 * 3 * 4 and snake_case_name", '<p class="line">2 * 3 * 4 and snake_case_name</p>'),
    (r"\*no\* ``a`b``", '<p class="line">*no* <code>a`b</code></p>'),
    ("- a\n- b\n  1. c\n  2. d\n\ntext", "<ul><li>a</li><li>b<ol"),
    ("3. c\n4. d", '<ol start="3"><li>c</li><li>d</li></ol>'),
    ("> q\n> r\n\n---", '<blockquote><p class="line">q\nr</p></blockquote><hr>'),
    ("| a | b |\n|:--|--:|\n| 1 | **2** |", "<td>1</td><td><strong>2</strong></td>"),
    ("```py\nx = 1\n\n- y\n```\nend", "<code>x = 1\n\n- y</code>"),
    ("see https://example.com/a_b_c.", 'href="https://example.com/a_b_c"'),
    ("a < b && c > d", '<p class="line">a &lt; b &amp;&amp; c &gt; d</p>'),
]
ENDLESS = [
    "[" * 20000,
    "*a " * 8000,
    "`" * 20000 + "x",
    "~" * 20000 + "`",
    "> " * 9000,
    "- " * 9000,
    "_" * 20000,
]
ENDLESS += [
    "#" * 20000 + " x",
    "```" + " " * 20000 + "`",
    "|" * 9000 + "\n" + "-|" * 9000,
    "*" * 20001,
    "![" * 9000,
]


async def test_a_models_text_and_name_stay_text(
    scripted: Any, live: Any, open_playground: Any, say: Any
) -> None:
    engine = scripted()
    say(engine, HOSTILE)
    name = '"><img src=x onerror=alert(9)>'
    gateway = await live(engine, playground=True, served_name=name)
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model(name)
    await user.send("<img src=x onerror=alert(10)>")
    assert "<script>alert(1)</script>" in await user.answer_text()
    conversation = user.page.locator("#conversation")
    for tag in ("script", "img", "svg", "iframe", "style", "i", "u", "b"):
        assert await conversation.locator(tag).count() == 0, tag
    links = await conversation.locator("a").all()
    targets = [await link.get_attribute("href") for link in links]
    assert targets == ["https://example.com/", "https://example.com/pixel.png"]
    assert await conversation.locator(".author").inner_text() == name
    assert all(url.startswith((gateway.url, "data:")) for url in user.log.urls)


async def test_markdown_becomes_elements(scripted: Any, live: Any, open_playground: Any) -> None:
    gateway = await live(scripted(), playground=True)
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model()
    for text, html in RENDERED:
        assert html in (await user.show([text])), text
    whole = "\n\n".join(text for text, _ in RENDERED)
    assert await user.show(list(whole)) == await user.show([whole])


async def test_no_text_makes_the_page_hang(scripted: Any, live: Any, open_playground: Any) -> None:
    gateway = await live(scripted(), playground=True)
    user = await open_playground(f"{gateway.url}/playground")
    await user.choose_model()
    begin = time.monotonic()
    for text in ENDLESS:
        assert await user.show([text]), text[:20]
    assert time.monotonic() - begin < 60
