"""Writes what TRL's reward functions say to the questions of reward_cases.py, by TRL's own interpreter."""

import json
import sys
from pathlib import Path

from reward_cases import answers_of
from trl import rewards

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answers_of(rewards), indent=0) + "\n", encoding="utf-8")
