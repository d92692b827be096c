"""Entry point of the command line: `diffusion-lens` and `python -m diffusion_lens` call `main`.

`accelerate launch -m diffusion_lens finetune ...` needs this module.
"""

import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C during its import ends it without a traceback, as it does later."""
    if sys.stderr is not None and not sys.stderr.isatty() and "tqdm" not in sys.modules:
        # In a log, progress is written every 30 seconds, and for shorter work not at all. tqdm reads this on import.
        for name in ("DELAY", "MININTERVAL", "MAXINTERVAL"):
            os.environ.setdefault(f"TQDM_{name}", "30")
    try:
        from diffusion_lens.cli import app

        app()
    except KeyboardInterrupt:  # raised during the import, before the application can catch it
        sys.stderr.write("Stopped.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
