"""Reward of smollm2-gsm8k.yaml: 1 where a response ends with the right number, a verifiable reward."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The number after the last `####`, else the last number of the text; None where there is none."""
    found = NUMBER.findall(text.rpartition("####")[2]) or NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def correct(response: str, answer: str) -> float:
    """1.0 where the response's final number is that of the worked answer (column `answer` of GSM8K), else 0.0."""
    said, wanted = final_number(response), final_number(answer)
    return float(said is not None and said == wanted)
