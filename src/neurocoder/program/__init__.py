"""The program-memory layer: weights composed for every input from a memory of singular vectors and values."""

from neurocoder.program.cached import cached
from neurocoder.program.conv import Conv2d
from neurocoder.program.freeze import freeze
from neurocoder.program.linear import Linear
from neurocoder.program.memory import ProgramMemory

__all__ = ["Conv2d", "Linear", "ProgramMemory", "cached", "freeze"]
