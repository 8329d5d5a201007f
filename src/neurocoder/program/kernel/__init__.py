"""The hand-written fast paths of `neurocoder.functional`: composing with a backward of its own, and few rows."""
