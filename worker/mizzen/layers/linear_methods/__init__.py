# SPDX-License-Identifier: Apache-2.0
"""Linear methods, which store the weights of a linear layer and multiply by them."""
