# SPDX-License-Identifier: Apache-2.0
"""Services under load while they are changed and broken: every answer and every status is checked.

`make test`, `make soak` and `make e2e` run variants of it; `docs/contributing.md` describes them.
"""
