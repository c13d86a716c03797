# SPDX-License-Identifier: Apache-2.0
"""The only node of a local cluster: a kubelet that runs containers as local processes."""
