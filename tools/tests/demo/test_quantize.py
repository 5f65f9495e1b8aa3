# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The quantiser of the demo checkpoint, against the definitions of the formats."""

import hashlib

import pytest
import torch

from tools.demo import checkpoint, quantize

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def model() -> checkpoint.Checkpoint:
    return checkpoint.plain(checkpoint.Geometry(num_hidden_layers=4))


def unpack_nvfp4(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    low, high = parts["weight"] & 15, parts["weight"] >> 4
    codes = torch.stack((low, high), dim=-1).flatten(1).long()
    values = torch.where(codes < 8, E2M1[codes % 8], -E2M1[codes % 8])
    scales = parts["weight_scale"].float() * parts["weight_scale_2"]
    return values * scales.repeat_interleave(16, dim=1)


def test_codes_are_the_nearest() -> None:
    values = torch.linspace(-6.5, 6.5, 2001)
    codes = quantize.e2m1_codes(values).long()
    assert ((codes >= 8) == values.signbit()).all()
    distance = (values.abs()[:, None] - E2M1).abs()
    chosen = distance.gather(1, codes[:, None] % 8)[:, 0]
    assert torch.equal(chosen, distance.amin(1))


def test_ties_go_to_even_codes() -> None:
    midpoints = (E2M1[1:] + E2M1[:-1]) / 2
    assert tuple(midpoints.tolist()) == quantize.E2M1_BOUNDS
    assert quantize.e2m1_codes(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_nvfp4_is_close() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    parts = quantize.nvfp4_tensors(weight, weight.abs().amax())
    assert parts["weight"].shape == (64, 128)
    assert parts["weight_scale"].shape == (64, 16)
    assert parts["weight_scale"].dtype == torch.float8_e4m3fn
    # Half a step of the widest interval, 2 of 6, and the scale's rounding, 1/16.
    largest = weight.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
    bound = (largest * (1 / 6 + 1 / 16)).expand(-1, -1, 16).flatten(1)
    assert ((unpack_nvfp4(parts) - weight).abs() <= bound).all()
    error = (unpack_nvfp4(parts) - weight).norm() / weight.norm()
    assert error < 0.11


def test_a_zero_block_stays_zero() -> None:
    weight = torch.zeros(2, 32)
    weight[1, 20] = 3.0
    parts = quantize.nvfp4_tensors(weight, weight.abs().amax())
    assert torch.equal(unpack_nvfp4(parts), weight)


@pytest.mark.parametrize("shape", [(128, 256), (200, 136)])
def test_fp8_is_close(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = quantize.fp8_block_tensors(weight)
    scale = parts["weight_scale_inv"]
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    scale = scale[: shape[0], : shape[1]]
    error = (parts["weight"].float() * scale - weight).abs()
    # Half a unit of three bits after the point, or of the smallest exponent.
    assert (error <= torch.maximum(weight.abs() / 16, scale * 2**-10)).all()


def test_a_zero_fp8_block_stays_zero() -> None:
    parts = quantize.fp8_block_tensors(torch.zeros(130, 16))
    assert (parts["weight"].float() == 0).all()
    assert parts["weight_scale_inv"].isfinite().all()


@pytest.mark.parametrize("make", [quantize.nvfp4, quantize.fp8])
def test_what_is_quantised(make) -> None:
    plain = model()
    config, tensors = make(plain.config, plain.tensors)
    assert "quantization_config" not in plain.config
    assert config["quantization_config"]["quant_method"] in ("modelopt", "fp8")
    quantised = [name for name in plain.tensors if quantize.is_quantised(name)]
    # Three mixers of three, an attention of four, and four MLPs of three.
    assert len(quantised) == 3 * 3 + 4 + 4 * 3
    for name, tensor in plain.tensors.items():
        if name in quantised:
            assert tensors[name].dtype in (torch.uint8, torch.float8_e4m3fn)
        else:
            assert torch.equal(tensors[name], tensor)


def test_fused_layers_share_a_global_scale() -> None:
    plain = model()
    _, tensors = quantize.nvfp4(plain.config, plain.tensors)
    for group, prefix in (
        (("gate_proj", "up_proj"), "model.layers.0.mlp"),
        (("q_proj", "k_proj", "v_proj"), "model.layers.3.self_attn"),
        (("in_proj_qkv", "in_proj_z"), "model.layers.0.linear_attn"),
    ):
        scales = {tensors[f"{prefix}.{m}.weight_scale_2"].item() for m in group}
        assert len(scales) == 1


@pytest.mark.parametrize(
    ("make", "digest"),
    [(quantize.nvfp4, "f16f5e74df14c95b"), (quantize.fp8, "2bb4e0c41a44040e")],
)
def test_the_same_bytes_every_time(make, digest: str) -> None:
    plain = model()
    _, tensors = make(plain.config, plain.tensors)
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode())
        data = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        state.update(data.numpy().tobytes())
    assert state.hexdigest()[:16] == digest
