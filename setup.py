# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python setup.py ...`` on the whole fork: makes build/tree and runs there.

``pip install .`` does not come through here; see tools/fork/build_backend.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tools.fork.build_backend import run_setup  # noqa: E402

if __name__ == "__main__":
    run_setup(sys.argv[1:])
