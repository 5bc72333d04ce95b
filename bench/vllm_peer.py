"""The peer of `bench.sampler --vllm-python`: vLLM's CPU build samples the same prompts. Runs in vLLM's own environment,
without Keel, and prints one JSON object last: {"tokens_per_second": [of each round], "version"}.
"""

import argparse
import json
import sys
import time

import vllm  # pyright: ignore[reportMissingImports]: it has an environment of its own


def main() -> None:
    """Reads `--prompts-file`, a JSON list of lists of token ids, and samples one response to each, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts-file", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    chosen = parser.parse_args()
    with open(chosen.prompts_file, encoding="utf-8") as file:
        prompts = [{"prompt_token_ids": ids} for ids in json.load(file)]
    engine = vllm.LLM(chosen.model, dtype=chosen.dtype, enforce_eager=True, max_model_len=256, seed=0)
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=chosen.tokens, ignore_eos=True, logprobs=0)
    rates = []
    for _ in range(chosen.rounds + 1):
        start = time.perf_counter()
        made = engine.generate(prompts, sampling, use_tqdm=False)
        rates.append(len(prompts) * chosen.tokens / (time.perf_counter() - start))
        assert all(len(one.outputs[0].token_ids) == chosen.tokens for one in made)
    sys.stdout.write(json.dumps({"tokens_per_second": rates[1:], "version": vllm.__version__}) + "\n")


if __name__ == "__main__":
    main()
