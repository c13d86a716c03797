# SPDX-License-Identifier: Apache-2.0
"""Tool calls: schemas and checks of a request's tools, and the parser and grammars for each model family."""
