# SPDX-License-Identifier: Apache-2.0
"""The gateway's end of the wire: a reconnecting client per engine, its requests and file downloads."""
