"""Reinforcement learning: games, rollouts, the actor-critic loss, and two trainers of the same agent."""
