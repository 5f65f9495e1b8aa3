# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What prefill still holds when each of its kernels allocates.

The layers' own code runs on the CPU with stand-ins for the kernels. A tensor's
memory is a NumPy array, whose lifetime is that of the tensor's storage, views
included; each stand-in notes which arrays are still alive.
"""

import weakref
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
from vllm.third_party.flash_linear_attention.ops import chunk
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

TOKENS, DECODES, HEADS, DIM = 70, 2, 2, 4
PREFIX = "layers.0.linear_attn"
LAYER = gdn.QwenGatedDeltaNetAttention


class Memory:
    """Names of storages, and what was alive when each kernel was called."""

    def __init__(self) -> None:
        self._arrays: dict[str, weakref.ref] = {}
        self.at: dict[str, set[str]] = {}

    def new(self, name: str, *shape: int) -> torch.Tensor:
        array = np.zeros(shape, np.float16)
        self._arrays[name] = weakref.ref(array)
        return torch.from_numpy(array)

    def note(self, kernel: str) -> None:
        self.at[kernel] = {
            name for name, ref in self._arrays.items() if ref() is not None
        }

    def alive(self, name: str) -> bool:
        return self._arrays[name]() is not None


@pytest.fixture
def memory() -> Memory:
    return Memory()


# ---------------------------------------------------------------------------
# The chunked gated delta rule
# ---------------------------------------------------------------------------


@pytest.fixture
def chunked(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The rule with stand-ins for its six kernels."""

    def kernel(name: str, *made: str) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            memory.note(name)
            tensors = [memory.new(m, 1, TOKENS, HEADS, DIM) for m in made]
            return tensors[0] if len(tensors) == 1 else tuple(tensors)

        monkeypatch.setattr(chunk, name, run)

    kernel("chunk_local_cumsum", "sums")
    kernel("chunk_scaled_dot_kkt_fwd", "matrix")
    kernel("solve_tril", "inverse")
    kernel("recompute_w_u_fwd", "w", "u")
    kernel("chunk_gated_delta_rule_fwd_h", "h", "new values", "final state")
    kernel("chunk_fwd_o", "output")
    return memory


def rule(memory: Memory, function: Any) -> Any:
    q, k, v = (memory.new(name, 1, TOKENS, HEADS, DIM) for name in "qkv")
    g, beta = (memory.new(name, 1, TOKENS, HEADS) for name in ("g", "beta"))
    state = memory.new("state", 1, HEADS, DIM, DIM)
    with torch.inference_mode():
        return function(q, k, v, g, beta, 1.0, state, True)


GIVEN = {"q", "k", "v", "g", "beta", "state"}


def test_the_rule_holds_what_later_kernels_read(chunked: Memory) -> None:
    output, state = rule(chunked, chunk.chunk_gated_delta_rule)
    at = chunked.at
    assert at["solve_tril"] == GIVEN | {"sums", "matrix"}
    assert at["recompute_w_u_fwd"] == GIVEN | {"sums", "inverse"}
    assert at["chunk_gated_delta_rule_fwd_h"] == GIVEN | {"sums", "w", "u"}
    assert at["chunk_fwd_o"] == GIVEN | {"sums", "h", "new values", "final state"}
    assert output.shape == (1, TOKENS, HEADS, DIM)
    assert chunked.alive("final state") and state is not None


def test_a_suppressed_recomputation_keeps_what_it_returns(
    chunked: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk, "SUPPRESS_LEVEL", 3)
    returned = rule(chunked, chunk.chunk_gated_delta_rule_fwd)
    held = {"sums", "inverse", "w", "h", "new values", "final state"}
    assert chunked.at["chunk_fwd_o"] == GIVEN | held
    assert all(isinstance(tensor, torch.Tensor) for tensor in returned)
    chunked.note("end")
    assert chunked.at["end"] == held | {"output"}


# ---------------------------------------------------------------------------
# The layer around it
# ---------------------------------------------------------------------------

KEYS = VALUES = HEADS * DIM
QKV = 2 * KEYS + VALUES


@pytest.fixture
def layer(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A layer with upstream's `_forward_core`, and stand-ins for its kernels."""

    def convolve(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.convolved_input = weakref.ref(x)
        return memory.new("convolved", x.shape[1], x.shape[0]).transpose(0, 1)

    def split(conv_output: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        self.held_by_split = self.convolved_input()
        tokens = conv_output.shape[0]
        heads = [memory.new(name, tokens, HEADS, DIM) for name in "qkv"]
        return (*heads, *(memory.new(n, tokens, HEADS) for n in ("g", "beta")))

    def update(q: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        memory.note("decode")
        return torch.zeros(1, q.shape[1], HEADS, DIM, dtype=torch.float16), None

    def rule(q: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        memory.note("prefill")
        out = torch.ones(1, q.shape[1], HEADS, DIM, dtype=torch.float16)
        return out, torch.zeros(1, HEADS, DIM, DIM)

    weight = torch.zeros(QKV, 1, 4)
    self = SimpleNamespace(
        prefix=PREFIX,
        enable_packed_recurrent_decode=True,
        enable_fused_gdn_spec_decode=False,
        gqa_interleaved_layout=True,
        tp_size=1,
        num_k_heads=HEADS,
        num_v_heads=HEADS,
        head_k_dim=DIM,
        head_v_dim=DIM,
        key_dim=KEYS,
        value_dim=VALUES,
        activation="silu",
        A_log=None,
        dt_bias=None,
        conv1d=SimpleNamespace(weight=weight, bias=None),
        kv_cache=(torch.zeros(4, 3, QKV), torch.zeros(4, HEADS, DIM, DIM)),
        chunk_gated_delta_rule=rule,
        held_by_split=None,
    )
    for name in ("rearrange_mixed_qkv", "fix_query_key_value_ordering"):
        setattr(self, name, MethodType(getattr(LAYER, name), self))
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)
    monkeypatch.setattr(gdn, "causal_conv1d_fn", convolve)
    monkeypatch.setattr(gdn, "causal_conv1d_update", lambda x, *a, **k: x)
    monkeypatch.setattr(gdn, "fused_post_conv_prep", split)
    monkeypatch.setattr(gdn, "fused_sigmoid_gating_delta_rule_update", update)
    return self


def metadata(decodes: int = 0, drafted: int = 0) -> GDNAttentionMetadata:
    """One prompt, next to requests of one token or with drafts."""
    prompt = TOKENS - decodes - drafted
    tokens = torch.arange(TOKENS)
    requests = torch.arange(2)
    return GDNAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=prompt,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_spec_decodes=int(drafted > 0),
        num_spec_decode_tokens=drafted,
        num_actual_tokens=TOKENS,
        spec_query_start_loc=requests,
        non_spec_query_start_loc=torch.arange(4),
        spec_state_indices_tensor=torch.zeros(1, 2, dtype=torch.long),
        non_spec_state_indices_tensor=requests,
        spec_sequence_masks=torch.ones(1, dtype=torch.bool) if drafted else None,
        spec_token_indx=tokens[:drafted],
        non_spec_token_indx=tokens[drafted:],
        prefill_state_indices=torch.zeros(1, dtype=torch.long),
        prefill_has_initial_state=torch.ones(1, dtype=torch.bool),
    )


def core(
    layer: SimpleNamespace,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    attention: GDNAttentionMetadata,
) -> torch.Tensor:
    context = SimpleNamespace(attn_metadata={PREFIX: attention})
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    mixed_qkv = memory.new("projection", TOKENS, QKV)
    gates = torch.zeros(TOKENS, HEADS, dtype=torch.float16)
    output = torch.full((TOKENS, HEADS, DIM), 7, dtype=torch.float16)
    with torch.inference_mode():
        LAYER._forward_core(layer, mixed_qkv, gates, gates, output)  # type: ignore[arg-type]
    return output


SPLIT = {"projection", "q", "k", "v", "g", "beta"}


def test_prefill_lets_go_of_the_convolution(
    layer: SimpleNamespace, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = core(layer, memory, monkeypatch, metadata())
    assert memory.at == {"prefill": SPLIT}
    assert torch.equal(output, torch.ones_like(output))


def test_decodes_beside_a_prompt_have_it_before(
    layer: SimpleNamespace, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = core(layer, memory, monkeypatch, metadata(decodes=DECODES))
    assert memory.at == {"decode": SPLIT | {"convolved"}, "prefill": SPLIT}
    assert torch.equal(output[:, 0, 0], (torch.arange(TOKENS) >= DECODES).half())


def test_drafts_beside_a_prompt_keep_no_copy(
    layer: SimpleNamespace, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's tokens are selected first, and the convolution reads a copy."""
    output = core(layer, memory, monkeypatch, metadata(drafted=DECODES))
    assert layer.held_by_split is None
    assert memory.at == {"decode": SPLIT | {"convolved"}, "prefill": SPLIT}
    assert torch.equal(output[:, 0, 0], (torch.arange(TOKENS) >= DECODES).half())


def test_interleaved_projections_are_let_go_of_once_copied(
    layer: SimpleNamespace, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two value heads for each key head, as Qwen3-Next has."""
    joined: list[weakref.ref] = []
    cat = torch.cat

    def watched(tensors: Any, dim: int = 0) -> torch.Tensor:
        joined.extend(weakref.ref(tensor) for tensor in tensors)
        return cat(tensors, dim=dim)

    def attend(mixed_qkv: torch.Tensor, b: Any, a: Any, core_attn_out: Any) -> None:
        memory.note("attention")
        assert mixed_qkv.shape == (TOKENS, 4 * KEYS)
        assert len(joined) == 3
        assert not any(ref() is not None for ref in joined)

    layer.num_v_heads, layer.value_dim = 2 * HEADS, 2 * KEYS
    layer.in_proj_qkvz = lambda x: (memory.new("qkvz", TOKENS, 6 * KEYS), None)
    layer.in_proj_ba = lambda x: (memory.new("ba", TOKENS, 4 * HEADS), None)
    layer._forward_core = attend
    layer._output_projection = lambda core_attn_out, z: z
    context = SimpleNamespace(no_compile_layers={PREFIX: layer})
    monkeypatch.setattr(gdn, "get_forward_context", lambda: context)
    monkeypatch.setattr(gdn.torch, "cat", watched)
    monkeypatch.setattr(
        torch.ops.vllm, "qwen_gdn_attention_core", gdn.qwen_gdn_attention_core
    )
    monkeypatch.setattr(gdn, "_encode_layer_name", lambda name: name)
    monkeypatch.setattr(gdn, "_resolve_layer_name", lambda name: name)
    hidden = torch.zeros(TOKENS, 8, dtype=torch.float16)
    with torch.inference_mode():
        z = LAYER.forward_cuda(layer, hidden)  # type: ignore[arg-type]
    assert memory.at["attention"] == set()
    assert z.shape == (TOKENS, 2 * HEADS, DIM)


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


def attention(memory: Memory, **changes: Any) -> SimpleNamespace:
    """Stand-ins for an attention layer's modules."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        memory.note("attention")
        return memory.new("output", TOKENS, KEYS)

    def project(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        memory.note("projection")
        return x, None

    def norm(name: str) -> Any:
        return lambda x: memory.new(name, *x.shape)

    return SimpleNamespace(
        qkv_proj=lambda x: (memory.new("qkv", TOKENS, QKV), None),
        q_size=KEYS,
        kv_size=KEYS,
        head_dim=DIM,
        q_norm=norm("q"),
        k_norm=norm("k"),
        rotary_emb=lambda positions, q, k: (q, k),
        attn=attend,
        o_proj=project,
        **changes,
    )


def test_gated_attention_keeps_the_gate_alone(memory: Memory) -> None:
    def split(qkv: torch.Tensor, positions: Any) -> tuple[torch.Tensor, ...]:
        q, k, gate = (memory.new(name, TOKENS, KEYS) for name in ("q", "k", "gate"))
        return q, k, qkv[:, 2 * KEYS :], gate

    layer = attention(memory, _project_qkv_gate=split)
    out = Qwen3NextAttention.forward(layer, None, torch.zeros(TOKENS, 8))  # type: ignore[arg-type]
    assert memory.at["attention"] == {"qkv", "q", "k", "gate"}
    assert memory.at["projection"] == {"gate"}
    assert out.shape == (TOKENS, KEYS)


def test_attention_without_a_gate(memory: Memory) -> None:
    layer = attention(memory)
    out = Qwen3MoeAttention.forward(layer, None, torch.zeros(TOKENS, 8))  # type: ignore[arg-type]
    assert memory.at["attention"] == {"qkv", "q", "k"}
    assert memory.at["projection"] == {"output"}
    assert out.shape == (TOKENS, KEYS)
