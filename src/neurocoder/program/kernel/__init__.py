"""The fast paths of composing programs: fewer passes over memory, and few operations for few rows."""
