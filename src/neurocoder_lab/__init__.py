"""The laboratory: experiments with stored neural programs. It imports the library, never the other way round."""
