"""Others' side of decode.py: PYTHON decode_beside.py PROMPT TOKENS FILE.gguf ...

Runs in a Python that has llama-cpp-python or openvino-genai. Each line of the input is the number
of a file; the answer is the milliseconds of CPU of a token on one thread, greedy, after a prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


def by_llama_cpp(path: str, prompt: list[int]) -> Callable[[int], object]:
    """A function that generates so many tokens."""
    from llama_cpp import Llama  # of another environment, as what is imported below

    settings: Any = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 256, "verbose": False}
    model = Llama(path, **settings)

    def generate(tokens: int) -> None:
        model.reset()
        generated: Any = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _ in range(tokens):
            next(generated)

    return generate


def by_openvino(path: str, prompt: list[int]) -> Callable[[int], object]:
    """The same with OpenVINO."""
    import numpy as np
    import openvino_genai
    from openvino import Tensor

    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=1)
    asked = openvino_genai.GenerationConfig()
    asked.do_sample, asked.ignore_eos = False, True

    def generate(tokens: int) -> None:
        asked.max_new_tokens = tokens
        pipeline.generate(Tensor(np.array([prompt])), asked)

    return generate


def milliseconds(generate: Callable[[int], object], tokens: int) -> float:
    """Milliseconds of CPU to generate so many tokens."""
    began = time.process_time()
    generate(tokens)
    return 1e3 * (time.process_time() - began)


def main() -> None:
    prompt, tokens = list(range(2, 2 + int(sys.argv[1]))), int(sys.argv[2])
    try:
        models = [by_llama_cpp(path, prompt) for path in sys.argv[3:]]
    except ImportError:
        models = [by_openvino(path, prompt) for path in sys.argv[3:]]
    for line in sys.stdin:
        model = models[int(line)]
        first = milliseconds(model, 1)
        print((milliseconds(model, 1 + tokens) - first) / tokens, flush=True)


if __name__ == "__main__":
    main()
