"""Where the command line begins: `diffusion-lens` calls `main`, and so does `python -m diffusion_lens`.

`accelerate launch -m diffusion_lens finetune ...` needs the module.
"""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as quietly as it does afterwards."""
    try:
        from diffusion_lens.cli import app

        app()
    except KeyboardInterrupt:  # before the application is there to catch it
        sys.stderr.write("Stopped.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
