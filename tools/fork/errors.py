# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one exception type that the commands turn into an exit status."""


class ForkError(Exception):
    """A failure that the user can act on; the message names what and how."""
