"""`python -m torchtitan`: the command `torchtitan`."""

import os
import sys

# Like the installed command, keep the current folder, which may be untrusted, from shadowing
# libraries.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from torchtitan.cli.main import main  # noqa: E402 (must follow the change of sys.path)

sys.exit(main())
