"""llama.cpp's side of decode.py: PYTHON decode_llama_cpp.py PROMPT TOKENS FILE.gguf ...

Runs in a Python that has llama-cpp-python. Each line of the input is the number of a file; the
answer is the milliseconds of CPU of a token on one thread, greedy, after a prompt.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from llama_cpp import Llama  # of another environment


def seconds(model: Any, prompt: list[int], tokens: int) -> float:
    """Seconds of CPU to take a prompt and to generate so many tokens."""
    began = time.process_time()
    model.reset()
    for number, _ in enumerate(model.generate(prompt, temp=0.0, repeat_penalty=1.0), start=1):
        if number == tokens:
            break
    return time.process_time() - began


def main() -> None:
    prompt, tokens = list(range(2, 2 + int(sys.argv[1]))), int(sys.argv[2])
    settings = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 256, "verbose": False}
    models = [Llama(path, **settings) for path in sys.argv[3:]]
    for line in sys.stdin:
        model = models[int(line)]
        first, all_of_them = (seconds(model, prompt, number) for number in (1, 1 + tokens))
        print(1e3 * (all_of_them - first) / tokens, flush=True)


if __name__ == "__main__":
    main()
