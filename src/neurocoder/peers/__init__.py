"""Other layers whose computation depends on their input, each built like the `nn.Linear` it replaces."""

from neurocoder.peers.film import FiLM
from neurocoder.peers.hypernet import HyperLinear
from neurocoder.peers.moe import Balance, MixtureOfExperts, balance
from neurocoder.peers.nsm import StoredProgramMemory

__all__ = ["Balance", "FiLM", "HyperLinear", "MixtureOfExperts", "StoredProgramMemory", "balance"]
