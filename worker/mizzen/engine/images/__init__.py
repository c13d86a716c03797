# SPDX-License-Identifier: Apache-2.0
"""Images of prompts in the engine: decoding in confined processes outside the engine's loop."""
