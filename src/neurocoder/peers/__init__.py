"""Other layers to compare with, conditional ones and a static one, each built like the `nn.Linear` it replaces."""

from neurocoder.peers.film import FiLM
from neurocoder.peers.hypernet import HyperLinear
from neurocoder.peers.lowrank import LowRank
from neurocoder.peers.moe import Balance, MixtureOfExperts, balance
from neurocoder.peers.nsm import StoredProgramMemory

__all__ = ["Balance", "FiLM", "HyperLinear", "LowRank", "MixtureOfExperts", "StoredProgramMemory", "balance"]
