# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep this repository's patches and files applied to a pinned vLLM release.

The repository holds the files that the fork adds and, in ``patches/``, the
edits to files that upstream has. ``build/tree/`` is the whole fork: a git
repository whose first commit is the pinned release and whose next commits are
the topics of ``patches/series.toml``, one each. README.md beside this file is
the manual.
"""
