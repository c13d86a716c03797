# SPDX-License-Identifier: Apache-2.0
"""The playground: a chat page in the browser, which uses the gateway's own API."""
