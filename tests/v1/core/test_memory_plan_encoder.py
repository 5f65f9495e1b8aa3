# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A multimodal encoder in the plan: what an H200 measured, and what is counted.

The H200's figures are of 2026-11-30, FP16, eager, on 29.76 GiB: eight layers of the
27B geometry in NVFP4 with its vision tower, Triton's attention, SDPA in the tower.
"""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.v1.core.memory_plan_cases as cases
from tests.v1.core.test_memory_plan_cards import run_plans
from tests.v1.worker.vision_checkpoint import TOWER, multimodal, write_multimodal
from vllm.model_executor.custom_op import CustomOp
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.memory_plan import encoder, planner, sizes
from vllm.v1.core.memory_plan.activations import Line, Part, Peak, Sizes
from vllm.v1.core.memory_plan.encoder import (
    NOT_RUN,
    EncoderSizes,
    encoded_of,
    read_encoder,
)
from vllm.v1.core.memory_plan.planner import Changes, Device, Planner, Rank, RankFigures
from vllm.v1.worker.profile_batches import Limits

MIB = 2**20


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here holds a device."""
    return False


MEASURED: dict[str, dict[str, Any]] = {
    "images": dict(
        shapes={"1 x 8192": 1486, "15 x 546": 1580, "1 x 8192 with 1 image": 1833},
        budget=20_533,
    ),
    "videos": dict(
        shapes={"1 x 8192": 1446, "15 x 546": 1540, "1 x 8192 with 1 video": 1446},
        budget=20_906,
    ),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    large, tiny = multimodal(cases.hybrid_27b(8), TOWER), multimodal()
    write_multimodal(folder / "images", large, 16_384, 12_288)
    write_multimodal(folder / "videos", large, 4_096, 12_288)
    write_multimodal(folder / "tiny", tiny, 256, 200)
    fp8 = dict(quant_method="fp8", activation_scheme="dynamic")
    tiny |= dict(quantization_config=fp8)
    write_multimodal(folder / "tiny FP8", tiny, 256, 200)

    def engine(model: str, **options: Any) -> dict[str, Any]:
        return dict(
            model=str(folder / model),
            dtype="float16",
            enforce_eager=True,
            max_model_len=32_768,
            max_num_seqs=16,
            max_num_batched_tokens=8_192,
            limit_mm_per_prompt=dict(image=8, video=1),
            gpu_memory_utilization=29.76 * 1024 / 143_156,
            enable_prefix_caching=False,
            attention_backend="TRITON_ATTN",
            mm_encoder_attn_backend="TORCH_SDPA",
        ) | dict(options)

    none = dict(limit_mm_per_prompt=dict(image=0, video=0))
    model = "vllm.model_executor.models.qwen3_vl.Qwen3VLForConditionalGeneration"
    changes: dict[str, dict[str, Any]] = {
        "fewer tokens": dict(max_num_batched_tokens=4_096),
        "more tokens": dict(max_num_batched_tokens=32_768),
        "short": dict(max_model_len=4_096),
        "fp8": dict(kv_cache_dtype="fp8"),
        "text only": dict(text_only=True),
    }
    # For weights, a step of text and a request of 32,768 tokens.
    tight = dict(gpu_memory_utilization=9_000 / 143_156)
    of: dict[str, dict[str, Any]] = {
        "images": dict(engine=engine("images"), changes=changes),
        "videos": dict(engine=engine("videos")),
        "text only": dict(engine=engine("images", **none)),
        "skipped": dict(engine=engine("images", skip_mm_profiling=True)),
        "fails": dict(engine=engine("images"), fails=f"{model}.embed_multimodal"),
        "tight": dict(engine=engine("images", **tight)),
        "typed": dict(
            engine=engine("images", **tight | dict(language_model_only=True))
        ),
        "two ranks": dict(engine=engine("images", tensor_parallel_size=2)),
        "tiny": dict(engine=engine("tiny", max_model_len=2_048)),
        "tiny FP8": dict(engine=engine("tiny FP8", max_model_len=2_048)),
    }
    made = dict(zip(of, run_plans(["h200"], list(of.values()))))
    # Its rotary embedding takes another path, and it has no other attention.
    (made["on a V100"],) = run_plans(["v100-32gb"], [dict(engine=engine("images"))])
    return made


@pytest.mark.parametrize("case", MEASURED)
def test_the_peaks_that_an_h200_measured(
    plans: dict[str, dict[str, Any]], case: str
) -> None:
    plan, measured = plans[case], MEASURED[case]
    shapes = {name: size / MIB for name, size in plan["shapes"]}
    for name, size in measured["shapes"].items():
        assert shapes[name] == pytest.approx(size, rel=0.005)
    assert plan["activation"] == max(size for _, size in plan["shapes"])
    # 192 MiB besides the weights: embeddings of 80, and libraries' workspaces.
    assert plan["resident"] / MIB == pytest.approx(192, abs=1)
    assert plan["weights"] / MIB == pytest.approx(7_456, rel=0.01)
    assert plan["budget"] / MIB == pytest.approx(measured["budget"], rel=0.005)
    assert plan["notes"] == []


def test_a_v100_has_the_same_peak(plans: dict[str, dict[str, Any]]) -> None:
    name = "1 x 8192 with 1 image"
    plan, other = plans["on a V100"], plans["images"]
    size, expected = (dict(p["shapes"])[name] for p in (plan, other))
    assert size / MIB == pytest.approx(expected / MIB, abs=1)
    assert plan["notes"] == []


def test_the_batch_that_encodes_is_the_highest_or_is_not(
    plans: dict[str, dict[str, Any]],
) -> None:
    images, videos = plans["images"], plans["videos"]
    assert images["activation_shape"] == "1 x 8192 with 1 image"
    assert images["activation_part"] == "multimodal encoder"
    assert videos["activation_shape"] == "15 x 546"
    assert videos["activation_part"] == "gated delta net"


@pytest.mark.parametrize(("case", "tokens"), [("images", 16_384), ("videos", 12_288)])
def test_a_full_cache_is_in_every_batch(
    plans: dict[str, dict[str, Any]], case: str, tokens: int
) -> None:
    """Of 5,120 FP16 values a token."""
    shapes = dict(plans[case]["shapes"])
    for name, size in plans["text only"]["shapes"]:
        assert shapes[name] - size == tokens * 5_120 * 2


def test_no_encoder_without_multimodal_inputs(plans: dict[str, dict[str, Any]]) -> None:
    plan = plans["text only"]
    assert not any("with" in name or "encoder" in name for name, _ in plan["shapes"])
    assert plan["notes"] == []
    assert plan["weights"] < plans["images"]["weights"] - 800 * MIB
    kept = plans["images"]["resident"] - plan["resident"]
    assert kept == 8_192 * 5_120 * 2 + planner.ENCODER_LIBRARY_BYTES


def test_a_plan_without_the_encoder(plans: dict[str, dict[str, Any]]) -> None:
    """The same as for a limit of no images and no videos."""
    plan = plans["images"]["replanned"]["text only"]
    for figure in ("weights", "resident", "shapes", "budget", "notes", "kv"):
        assert plan[figure] == plans["text only"][figure]


def test_no_images_are_a_remedy(plans: dict[str, dict[str, Any]]) -> None:
    tight, typed = plans["tight"], plans["typed"]
    assert not tight["fits"]
    (remedy,) = [r for r in tight["remedies"] if "--language" in r["settings"]]
    less = (tight["weights"] - typed["weights"]) / MIB
    assert remedy["settings"] == "--language-model-only"
    assert f"weights {less:,.1f} MiB less" in remedy["effect"]
    assert typed["fits"]


def test_an_encoder_that_start_up_does_not_profile(
    plans: dict[str, dict[str, Any]],
) -> None:
    plan = plans["skipped"]
    assert plan["shapes"] == plans["text only"]["shapes"]
    assert plan["weights"] == plans["images"]["weights"]
    (note,) = plan["notes"]
    assert "its cache are not in the plan (--skip-mm-profiling)" in note


def test_an_encoder_that_cannot_be_run_has_its_cache(
    plans: dict[str, dict[str, Any]],
) -> None:
    plan, images = plans["fails"], dict(plans["images"]["shapes"])
    text = {name: size for name, size in plan["shapes"] if "with" not in name}
    assert text == {name: images[name] for name in text}
    # The language model's own step, next to that image.
    shapes = dict(plan["shapes"])
    assert shapes["1 x 8192 with 1 image"] == shapes["1 x 8192"]
    assert plan["notes"] == [NOT_RUN]


def test_ranks_share_the_encoder(plans: dict[str, dict[str, Any]]) -> None:
    name = "1 x 8192 with 1 image"
    whole, half = dict(plans["images"]["shapes"])[name], plans["two ranks"]
    assert whole / 2 < dict(half["shapes"])[name] < whole
    assert half["notes"] == []


@pytest.mark.parametrize("case", ["tiny", "tiny FP8"])
def test_many_small_items(plans: dict[str, dict[str, Any]], case: str) -> None:
    """8,192 tokens of images of 256: two for each of 16 requests."""
    plan = plans[case]
    assert plan["notes"] == []
    assert plan["activation_shape"] == "16 x 512 with 32 images"
    # Four patches a token: 1,536 bytes, the same in FP16, and 64 values of each.
    assert plan["activation"] == 4 * 8_192 * (1_536 * (1 + 2) + 64 * 2)


def test_changed_settings_change_the_items(plans: dict[str, dict[str, Any]]) -> None:
    plan, name = plans["images"], "1 x 8192 with 1 image"
    replanned = {k: dict(v["shapes"]) for k, v in plan["replanned"].items()}
    highest = dict(plan["shapes"])[name]
    # An image is encoded whole, however few tokens a step has.
    assert replanned["fewer tokens"]["1 x 4096 with 1 image"] == highest
    # Two of them, and a cache for two.
    more = replanned["more tokens"]
    assert more["2 x 16384 with 2 images"] >= 2 * (highest - 2 * MIB)
    # No request has it, and start-up runs the encoder alone.
    assert replanned["short"]["multimodal encoder"] == highest
    assert replanned["fp8"][name] == highest


@pytest.mark.parametrize(
    ("second", "images", "embeds", "draft", "values"),
    [
        (True, False, False, None, 0),
        (True, False, True, None, 64),
        (True, True, False, None, 64),
        # A draft's hidden states, and embeddings where it takes items too.
        (True, True, False, "text", 64 + 32),
        (True, True, False, "items", 64 + 32 + 32),
        (True, False, False, "items", 32),
        (True, True, False, "dflash", 64 + 32),
        # The first runner has them for every model, and so has its proposer.
        (False, False, False, None, 64),
        (False, True, False, "text", 64 + 64 + 32),
    ],
)
def test_buffers_of_embeddings(
    monkeypatch: pytest.MonkeyPatch,
    second: bool,
    images: bool,
    embeds: bool,
    draft: str | None,
    values: int,
) -> None:
    """Hidden states of 32 values, embeddings of 64; a token's, in FP16."""
    group = SimpleNamespace(is_first_rank=True)
    monkeypatch.setattr(sizes, "get_pp_group", lambda: group)
    model_config = SimpleNamespace(
        get_hidden_size=lambda: 32,
        get_inputs_embeds_size=lambda: 64,
        supports_multimodal_inputs=images,
        enable_prompt_embeds=embeds,
    )
    method = "dflash" if draft == "dflash" else "mtp"
    config: Any = SimpleNamespace(
        model_config=model_config,
        use_v2_model_runner=second,
        speculative_config=draft and SimpleNamespace(method=method),
    )
    module: Any = draft and torch.nn.Module()
    if module is not None:
        takes = draft != "text"
        monkeypatch.setattr(sizes, "supports_multimodal_embeddings", lambda _: takes)
    assert sizes._resident_token(config, module, 2) == 2 * values


# ---------------------------------------------------------------------------
# What is alive
# ---------------------------------------------------------------------------


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8, device="meta")


def test_what_is_alive_is_counted() -> None:
    parameter = meta(1_000)
    with encoder._Alive() as alive:
        held = meta(100)
        other = held + 1
        assert alive.now == alive.peak == 200
        view = other.view(10, 10)[2:]
        del other
        assert alive.now == 200
        del view
        assert (alive.now, alive.peak) == (100, 200)
        held.add_(1)
        parameter.add_(1)
        alone = parameter.view(-1)
        assert alive.now == 100
        torch.empty(50)  # Of the CPU.
        twice = torch.cat([held, held])
        assert (alive.now, alive.peak) == (300, 300)
        del held, twice, alone
    assert (alive.now, alive.peak) == (0, 300)


class Doubled(CustomOp):
    """A kernel that is not there, and four bytes for each of its inputs'."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no such kernel")

    forward_cpu = forward_cuda

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32)


class Tower(torch.nn.Module):
    """A model whose encoder names a device and doubles its input."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        # As `CustomOp.__init__` chooses it for a device.
        self.op = Doubled.__new__(Doubled)
        torch.nn.Module.__init__(self.op)
        self.op._forward_method = self.op.forward_cuda
        self.fails = fails

    def embed_multimodal(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        if self.fails:
            return [torch.zeros(int(pixels.sum()))]
        ids = torch.arange(3, pin_memory=True).pin_memory()
        assert ids.tolist() == [0, 1, 2]
        places = [ids.to("cuda"), torch.zeros(3, device="cuda"), ids.cuda()]
        assert {place.device.type for place in places} == {"meta"}
        return list(self.op(pixels))


def config_of(**scheduler: Any) -> Any:
    values = dict(max_num_seqs=4, disable_chunked_mm_input=False) | scheduler
    model = SimpleNamespace(dtype=torch.float16, get_inputs_embeds_size=lambda: 5)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**values), model_config=model
    )


def budget_of(
    monkeypatch: pytest.MonkeyPatch, most: int = 8, tokens: int = 6, cache: int = 100
) -> None:
    """Images of 20 pixels and 6 tokens, eight in a step, and a text token before
    each."""

    def made(mm_counts: dict[str, int]) -> dict[str, Any]:
        each = mm_counts["image"]
        element = MultiModalFieldElem(
            torch.zeros(6, 20, dtype=torch.uint8), MultiModalBatchedField()
        )
        return dict(
            mm_kwargs=dict(image=[MultiModalKwargsItem({"pixels": element})] * each),
            mm_placeholders=dict(
                image=[PlaceholderRange(1 + 7 * i, 6) for i in range(each)]
            ),
        )

    budget = SimpleNamespace(
        get_modality_with_max_tokens=lambda: "image",
        mm_max_items_per_batch=dict(image=most) if most else {},
        mm_max_toks_per_item=dict(image=tokens),
        encoder_cache_size=cache,
        processor=SimpleNamespace(get_dummy_mm_inputs=made),
    )
    monkeypatch.setattr(encoder, "MultiModalBudget", lambda *a, **k: budget)


LIMITS = Limits(tokens=64, sequences=4, model_len=64, context=True)


def test_an_encoder_is_run_on_what_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight items of 6 x 20 bytes, their batch, and four times that."""
    budget_of(monkeypatch)
    model = Tower()
    own, kernels = model.op._forward_method, encoder._kernel_classes()
    runs = [kernel.run for kernel in kernels]
    sizes = read_encoder(config_of(), model, LIMITS)
    assert sizes is not None
    assert (sizes.token, sizes.tokens) == (80, 48)
    assert sizes.prompt == Fraction(14, 12)
    # Ids of eight bytes, three on the device, and zeros of four.
    assert sizes.peak == 8 * 120 * (1 + 4) + 2 * 3 * 8 + 3 * 4
    assert sizes.notes == ()
    assert model.op._forward_method == own
    assert [kernel.run for kernel in kernels] == runs


def test_what_needs_values_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_of(monkeypatch)
    sizes = read_encoder(config_of(), Tower(fails=True), LIMITS)
    assert sizes == EncoderSizes(token=10)
    assert sizes.notes == (NOT_RUN,)


def test_modalities_without_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_of(monkeypatch, most=0)
    assert read_encoder(config_of(), Tower(), LIMITS) is None
    encoded = encoded_of(config_of(), EncoderSizes(10, 48, peak=480), LIMITS)
    assert (encoded.cache, encoded.batch, encoded.peak) == (0, None, 0)


@pytest.mark.parametrize(
    ("most", "tokens", "sequences", "cache", "name", "figures"),
    [
        # As run: 8 of 6 tokens in 4 prompts, in a cache of 100.
        (8, 6, 4, 100, "4 x 16 with 8 images", (1_000, 520, 4_800)),
        # More than the cache says are in it.
        (8, 6, 4, 20, "4 x 16 with 8 images", (480, 0, 4_800)),
        (2, 6, 4, 20, "2 x 32 with 2 images", (200, 80, 1_200)),
        (1, 12, 4, 20, "1 x 63 with 1 image", (200, 80, 1_200)),
        # A prompt of 65 tokens is longer than the model's 64.
        (1, 55, 4, 20, None, (550, 0, 5_500)),
    ],
)
def test_what_an_encoder_adds(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    tokens: int,
    sequences: int,
    cache: int,
    name: str | None,
    figures: tuple[int, int, int],
) -> None:
    budget_of(monkeypatch, most, tokens, cache)
    sizes = EncoderSizes(token=10, tokens=48, prompt=Fraction(7, 6), peak=4_800)
    limits = Limits(tokens=64, sequences=sequences, model_len=64, context=True)
    encoded = encoded_of(config_of(max_num_seqs=sequences), sizes, limits)
    assert (encoded.batch and encoded.batch.name) == name
    assert (encoded.cache, encoded.others, encoded.peak) == figures


@pytest.mark.parametrize(
    ("token", "highest", "part"),
    [(10, 4_800 + 520, "multimodal encoder"), (90, 64 * 90 + 1_000, "MLP")],
)
def test_the_encoder_or_the_language_model(
    monkeypatch: pytest.MonkeyPatch, token: int, highest: int, part: str
) -> None:
    """The higher of them counts, for they do not run at once."""
    budget_of(monkeypatch)
    text = Sizes(2, parts=(Part("MLP", (Line("product", token=token),)),))
    sizes = EncoderSizes(token=10, tokens=48, prompt=Fraction(7, 6), peak=4_800)
    encoded = encoded_of(config_of(), sizes, LIMITS)
    longest = planner.peak_of_batches(text, [planner.longest(LIMITS)])
    peak = encoded.highest(longest, text)
    assert (peak.bytes, peak.part) == (highest, part)
    assert sum(size for _, size in peak.lines) == peak.bytes
    name, size = peak.shapes[-1]
    assert (name, size) == ("4 x 16 with 8 images", highest)
    assert len(peak.shapes) == 2


def test_remedies_at_start_up_know_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    found, config = EncoderSizes(10, peak=90), SimpleNamespace()
    ranks = [Rank(i, {}, 1, Sizes(2)) for i in range(4)]
    stages = [Rank(0, {}, 1, Sizes(2), found), Rank(2, {}, 1, Sizes(2))]
    monkeypatch.setattr(planner, "_make", lambda config: (config, stages))
    running = Planner(config, ranks, Device("a card", 1))  # type: ignore[arg-type]
    monkeypatch.setattr(planner, "takes_multimodal", lambda config: True)
    encoders = [rank.encoder for rank in running.with_encoders().ranks]
    assert encoders == [found, found, None, None]
    # Start-up measured an encoder that cannot be run here.
    stages[0] = replace(stages[0], encoder=EncoderSizes(10))
    assert {rank.encoder for rank in running.with_encoders().ranks} == {None}
    monkeypatch.setattr(planner, "takes_multimodal", lambda config: False)
    assert running.with_encoders() is running


def test_at_start_up_a_remedy_frees_the_weights_of_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what was measured, as many bytes as the made model loses: kernels may have
    repacked the others."""
    config, text = SimpleNamespace(), SimpleNamespace()
    ranks = [Rank(i, {}, 90, Sizes(2)) for i in range(2)]
    made = [Rank(0, {}, 100, Sizes(2)), Rank(1, {}, 80, Sizes(2))]
    measured = [RankFigures(i, 95, Peak(10, "a step", "", ())) for i in range(2)]
    planned = [RankFigures(i, 0, Peak(20, "a step", "", ())) for i in range(2)]
    monkeypatch.setattr(planner, "_make", lambda config: (config, made))
    monkeypatch.setattr(planner, "planned_figures", lambda *args: planned)
    monkeypatch.setattr(planner, "takes_multimodal", lambda config: config is not text)
    running = Planner(config, ranks, Device("a card", 1), measured=measured)  # type: ignore[arg-type]
    running = running.with_encoders()
    monkeypatch.setattr(Planner, "_base", planned)
    left = [replace(made[0], weights=70), replace(made[1], weights=80)]
    without = running.figures(text, left, 0, None)  # type: ignore[arg-type]
    assert [figures.weights for figures in without] == [65, 95]
    shorter = running.figures(SimpleNamespace(), left, 0, None)  # type: ignore[arg-type]
    assert [figures.weights for figures in shorter] == [95, 95]


def test_a_text_model_has_no_encoder_to_do_without() -> None:
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(user_specified_block_size=True),
        model_config=SimpleNamespace(multimodal_config=None),
        scheduler_config=None,
    )
    with pytest.raises(ValueError, match="no multimodal encoder to serve without"):
        planner.changed(config, Changes(text_only=True))
