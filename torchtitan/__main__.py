"""`python -m torchtitan`: the command `torchtitan`."""

import os
import sys

# As for the command itself: the current folder, possibly untrusted, must not shadow libraries.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from torchtitan.cli.main import main  # noqa: E402 (the libraries are looked for from here on)

sys.exit(main())
