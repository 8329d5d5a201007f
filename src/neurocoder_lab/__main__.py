"""The command `neurocoder`, also as `python -m neurocoder_lab` for `accelerate launch -m` and `torchrun -m`."""

import sys

from neurocoder_lab.signals import importing


def main() -> int:
    try:
        with importing():
            from neurocoder_lab.cli import main as command
        return command()
    except ModuleNotFoundError as error:
        if (error.name or "neurocoder").startswith("neurocoder"):
            raise
        text = f"the laboratory needs {error.name}, which the library alone does not bring"
        print(
            f"neurocoder: {text}: pip install 'neurocoder[lab]' (in a checkout: pip install '.[lab]')", file=sys.stderr
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
