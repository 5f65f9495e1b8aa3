# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether a configuration fits a device, and what would make it fit.

* ``activations``: the activation peak of a batch shape, from a model's sizes.
* ``table``: the plan as numbers, as a table and as JSON.
* ``encoder``: what a multimodal encoder adds to the batches.
* ``model``: a model without memory, for its weights, KV specs and sizes.
* ``planner``: from a configuration to a plan, and the remedies.
* ``admission``: the same table at start-up, from what was measured.

``vllm memory-plan`` and ``vllm serve`` share all of it.
"""
