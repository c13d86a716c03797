# SPDX-License-Identifier: Apache-2.0
"""Communication kernels over peer memory."""
