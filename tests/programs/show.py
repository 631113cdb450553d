"""Print how a program was started, as far as the program can see."""

import json
import os
import sys

if __name__ == "__main__":
    facts = {
        "argv": sys.argv,
        "path0": sys.path[0],
        "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "file": globals().get("__file__"),
        "annotations": isinstance((lambda x: x).__annotations__, dict),
        "stdin": sys.stdin.read(),
        "threshold": os.environ.get("HVDLITE_FUSION_THRESHOLD"),
        "spaces": os.environ.get("WITH_SPACES"),
    }
    print(json.dumps(facts))
