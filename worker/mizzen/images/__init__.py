# SPDX-License-Identifier: Apache-2.0
"""Images of prompts before the model sees them: headers, sizes, placeholders, and decoding in a sandbox."""
