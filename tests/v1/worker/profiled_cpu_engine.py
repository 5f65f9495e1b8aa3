# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine on the CPU whose worker profiles real steps before it starts.

Reads a task as JSON from stdin and prints a line ``RESULT`` with JSON. The steps,
their metadata and the throw-away KV cache are real; only the counters of a device
allocator, which a CPU does not have, are made up from what a step schedules.

With ``VLLM_USE_V2_MODEL_RUNNER=1`` the second model runner serves, its Triton kernels
in Triton's interpreter.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from PIL import Image

SECOND_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if SECOND_RUNNER:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    class NoDriver:
        """vLLM asks for a driver, and the interpreter needs none."""

        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = SimpleNamespace(driver=NoDriver)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.worker import memory_profile, profile_batches  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

RESIDENT, PER_TOKEN, PER_REQUEST, PER_ITEM, UNUSED = 1000, 1, 100, 10**6, 7
KV_MEMORY = 2**28
LESS = 5
"""Powers of two that a rank has less than the one before it."""
SEEN: dict[str, Any] = {}


class StepMeter:
    """Counts a byte a token of the latest step, `PER_REQUEST` a request and `PER_ITEM`
    an item that it encodes."""

    def __init__(self) -> None:
        self.step = 0

    def reset(self) -> None:
        self.step = 0

    def allocated(self) -> int:
        return RESIDENT

    def peak(self) -> int:
        return RESIDENT + self.step

    def reserved_peak(self) -> int:
        return self.peak() + UNUSED


class ProfiledCPUWorker(CPUWorker):
    """Profiles with `StepMeter`, then sizes the cache as the CPU does."""

    def determine_available_memory(self) -> int:
        meter = StepMeter()
        SEEN["steps"] = []
        execute = self.execute_model

        def counted(scheduled):
            requests = len(scheduled.num_scheduled_tokens)
            tokens = scheduled.total_num_scheduled_tokens
            encoded = scheduled.scheduled_encoder_inputs.values()
            if tokens:
                SEEN["steps"].append([requests, tokens])
                meter.step = PER_TOKEN * tokens + PER_REQUEST * requests
                meter.step += PER_ITEM * sum(map(len, encoded))
            return execute(scheduled)

        self.execute_model = counted
        runner = self.model_runner
        drafter = (
            runner.speculator if SECOND_RUNNER else getattr(runner, "drafter", None)
        )
        if SECOND_RUNNER or drafter is not None:
            # The interpreter does not take the kernel of top-k and top-p, and
            # upstream's CPU stand-in of `expand` drops what is not int64: greedy.
            profile_batches._sampling = lambda: SamplingParams(temperature=0)
        if drafter is not None:
            propose = drafter.propose

            def proposed(*args, **kwargs):
                SEEN["drafted"] = SEEN.get("drafted", 0) + 1
                return propose(*args, **kwargs)

            drafter.propose = proposed
        SEEN["unsupported"] = memory_profile.unsupported(self.vllm_config, runner)
        # Ranks with different memory have to agree on the least.
        memory = KV_MEMORY >> LESS * self.rank
        with memory_profile.EncoderOutputs(runner) as outputs:
            if runner.supports_mm_inputs:
                runner.profile_run()
            encoder = None
            if outputs.kept():
                encoder = memory_profile.encoder_of(
                    self.vllm_config, outputs.kept(), runner.profile_run
                )
                SEEN["encoder"] = [encoder.kept, encoder.cache]
            passes = memory_profile.profile_batches(
                self, meter, lambda peak: memory, 0, encoder
            )
            SEEN["kept"] = outputs.size()
        del self.execute_model
        if drafter is not None:
            del drafter.propose
        SEEN["shapes"] = passes.shapes
        SEEN["fragmentation"] = passes.fragmentation
        requests = (
            runner.req_states.req_id_to_index if SECOND_RUNNER else runner.requests
        )
        SEEN["left"] = [
            len(requests),
            len(runner.kv_caches),
            int(hasattr(runner, "kv_cache_config")),
            int(self.cache_config.num_gpu_blocks is not None),
        ]
        return super().determine_available_memory()

    def seen(self) -> dict[str, Any]:
        """What this rank noted, and how many encoder outputs it has, of which how
        many share their memory."""
        cache = getattr(self.model_runner, "encoder_cache", None) or {}
        outputs = getattr(cache, "encoder_outputs", cache).values()
        shared = [o for o in outputs if o.untyped_storage().nbytes() > o.nbytes]
        return SEEN | dict(cached=[len(outputs), len(shared)])


def main() -> None:
    task = json.load(sys.stdin)
    if task["profile"]:
        task["engine"]["worker_cls"] = "__main__.ProfiledCPUWorker"
    llm = LLM(**task["engine"])
    prompts = [dict(prompt_token_ids=p) for p in task["prompts"]]
    for i, size in task.get("images", {}).items():
        image = Image.new("RGB", size, "red")
        prompts[int(i)]["multi_modal_data"] = dict(image=image)
    out = llm.generate(
        prompts,
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    tokens = [list(o.outputs[0].token_ids) for o in out]
    ranks = llm.collective_rpc("seen") if task["profile"] else [{}]
    print("RESULT " + json.dumps(ranks[0] | {"tokens": tokens, "ranks": ranks}))


if __name__ == "__main__":
    main()
