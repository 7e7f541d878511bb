"""python -m smollm2.zero_shot FOLDER QUESTIONS: zero-shot accuracy by lm-eval, as JSON on the
screen.

A model answers a question by the choice that it finds most likely behind it. The questions are two
tasks of BIG-bench (general_knowledge and human_organs_senses; Apache License 2.0).
"""

from __future__ import annotations

import json
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "https://pypi.org/pypi/bigbench/json"
TASKS = ("general_knowledge", "human_organs_senses")


def write_questions(path: Path) -> None:
    """Write the questions, a JSON object a line with question, choices, and the answer's number.

    Of the package's 358 MB, the first hundred are read, and nothing of it is installed.
    """
    with urllib.request.urlopen(PACKAGE) as answer:
        [file] = json.load(answer)["urls"]
    wanted = {f"bigbench/benchmark_tasks/{task}/task.json" for task in TASKS}
    lines: list[str] = []
    with (
        urllib.request.urlopen(file["url"]) as stream,  # noqa: S310
        tarfile.open(fileobj=stream, mode="r|gz") as archive,
    ):
        for member in archive:
            name = member.name.partition("/")[2]  # behind the package's version
            if name in wanted:
                content = archive.extractfile(member)
                assert content is not None, f"{member.name} is no file"
                lines += map(json.dumps, _questions(json.load(content)))
                wanted.remove(name)
                if not wanted:
                    break
    assert not wanted, f"bigbench lacks {wanted}"
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    partial.rename(path)


def _questions(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The questions of a task that have one right answer."""
    for example in task["examples"]:
        scores: dict[str, float] = example["target_scores"]
        best = max(scores.values())
        if [*scores.values()].count(best) == 1:
            yield {
                "question": example["input"].strip(),
                "choices": [*scores],
                "answer": [*scores.values()].index(best),
            }


def accuracy(folder: str, questions: Path) -> float:
    """The share of questions whose right answer the model of a folder finds most likely."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    model = HFLM(pretrained=folder, dtype="float32", batch_size=8, device="cpu")
    found = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)
    return float(found["results"]["questions"]["acc,none"])


def main() -> None:
    print(json.dumps({"accuracy": accuracy(sys.argv[1], Path(sys.argv[2]))}))


if __name__ == "__main__":
    main()
