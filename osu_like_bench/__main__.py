"""``python -m osu_like_bench``."""

from .cli import main

if __name__ == "__main__":
    main()
