# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare what start-up promised with what real batches use.

`python benchmarks/benchmark_startup_memory.py MODEL [--engine JSON] [--chunk 64]`
starts one engine in this process and sends, for each batch that start-up profiled,
as many prompts of that length at once: the peak over what is resident, the promise,
and what was reserved beyond the peak, in MiB. Two more batches are the worst for
kernels that work on chunks of `--chunk` tokens: prompts one token longer than a
chunk, and of random lengths. Exits with 1 when a peak is above the promise. Needs a
CUDA GPU.
"""

import argparse
import json
import os
import random
import re
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch  # noqa: E402

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

MIB = 2**20


def run(llm: LLM, lengths: list[int]) -> dict[str, float]:
    """Send prompts of these lengths at once; return figures in MiB and seconds."""
    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * i + j) % 250 for i in range(length)])
        for j, length in enumerate(lengths)
    ]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resident, start = torch.cuda.memory_allocated(), time.perf_counter()
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
    llm.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {
        "peak": (peak - resident) / MIB,
        "beyond": (torch.cuda.max_memory_reserved() - peak) / MIB,
        "seconds": time.perf_counter() - start,
    }


def batches(shapes: list[str], chunk: int) -> dict[str, list[int]]:
    """Return the prompts' lengths of each batch that prefill alone can repeat."""
    found = {}
    most = tokens = 1
    for shape in shapes:
        if match := re.fullmatch(r"(\d+) x (\d+)", shape):
            requests, length = map(int, match.groups())
            found[shape] = [length] * requests
            most, tokens = max((most, tokens), (requests, requests * length))
    uneven = min(most, tokens // (chunk + 1))
    if uneven > 1:
        length = (tokens // uneven - 1) // chunk * chunk + 1
        found[f"{uneven} x {length}, one above a chunk"] = [length] * uneven
        cuts = sorted(random.Random(0).sample(range(1, tokens), uneven - 1))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens])]
        found[f"{uneven} random lengths"] = lengths
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engine", default="{}", help="JSON of LLM(...) arguments")
    parser.add_argument("--chunk", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(model=args.model, **json.loads(args.engine))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    memory = worker.startup_memory
    if memory is None:
        sys.exit("start-up measured nothing: VLLM_TRUTHFUL_PROFILE=0, or no CUDA GPU")
    print("STARTUP", json.dumps(memory.to_dict()))
    promise = memory.activation_peak / MIB
    print(f"promised {promise:.0f} MiB by {memory.activation_shape}")
    highest = 0.0
    shapes = [name for name, _ in memory.shapes]
    for name, lengths in batches(shapes, args.chunk).items():
        figures = run(llm, lengths)
        highest = max(highest, figures["peak"])
        print(
            f"{name:32} peak {figures['peak']:7.0f}, "
            f"over the promise {figures['peak'] - promise:7.0f}, "
            f"reserved beyond {figures['beyond']:6.0f}, {figures['seconds']:6.2f} s"
        )
    print(f"promise / highest peak: {promise / highest:.3f}")
    return int(highest > promise)


if __name__ == "__main__":
    sys.exit(main())
