"""What all tests share."""

import os

# Virtual machines exist that announce AMX and refuse its instructions: the first bfloat16 product would end all tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
