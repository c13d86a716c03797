# SPDX-License-Identifier: Apache-2.0
"""Commands of `mizzen`, one module each; `mizzen.cli` registers them."""
