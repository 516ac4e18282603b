"""``python -m coconet_ops``: prints what this build is and what works on this machine."""

import argparse
import json

from . import build_info
from ._build_info import report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m coconet_ops",
        description="Prints what this build is and what works on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON: what build_info() returns")
    arguments = parser.parse_args()
    info = build_info()
    print(json.dumps(info, indent=1) if arguments.json else report(info))


if __name__ == "__main__":
    main()
