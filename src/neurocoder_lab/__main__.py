"""`python -m neurocoder_lab`, for `accelerate launch -m` and `torchrun -m`."""

import sys

from neurocoder_lab.cli import main

sys.exit(main())
