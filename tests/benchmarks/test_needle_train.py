# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Training, evaluating and quantising, on a model of one minute."""

import argparse
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks.needle import evaluate, model, quantize, task, train


def make(out: Path, *arguments: str, steps: int = 3) -> Path:
    budget = [f"--steps={steps}", "--tokens=256", "--log-every=1", "--device=cpu"]
    options = ["--architecture=tiny", "--max-length=256", *budget, *arguments]
    assert train.main([str(out), *options]) == 0
    return out


def log(out: Path) -> list[dict]:
    lines = (out / "train.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("trained"))


def test_the_same_seed_gives_the_same_model(trained, tmp_path):
    again = make(tmp_path / "again")
    assert log(again) == log(trained)
    files = [folder / "model.safetensors" for folder in (trained, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
    other = make(tmp_path / "other", "--seed=1")
    assert log(other) != log(trained)


def test_resuming_changes_nothing(trained, tmp_path, monkeypatch):
    """One step, its state, another, a kill, and two: the log and the weights of
    three steps, none twice."""
    stopped = tmp_path / "stopped"
    monkeypatch.setattr(train, "STATE_EVERY_S", -1.0)
    steps = 0

    def losses(*arguments):
        nonlocal steps
        steps += 1
        if steps == 2:
            monkeypatch.setattr(train, "STATE_EVERY_S", 1e9)
        if steps == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    real = train.losses
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "losses", losses)
        make(stopped)
    make(stopped, "--resume")
    assert log(stopped) == log(trained)
    ours, theirs = (load_file(f / "model.safetensors") for f in (stopped, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_budget_is_needed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([str(tmp_path)])
    assert "neither --steps nor --minutes" in capsys.readouterr().err


@given(
    steps=st.integers(1, 10_000) | st.none(),
    minutes=st.floats(0.1, 1000) | st.none(),
    step=st.integers(0, 20_000),
    seconds=st.floats(0, 1e5),
)
def test_progress_and_rate(steps, minutes, step, seconds):
    """Progress never falls, and the rate ends at zero."""
    budget = train.Budget(steps, minutes)
    here = budget.progress(step, seconds)
    assert budget.progress(step + 1, seconds) >= here
    assert budget.progress(step, seconds + 1) >= here
    if steps is not None and step >= steps:
        assert here >= 1
    assert 0 <= train.rate_at(step, here) <= 1
    if here >= 1:
        assert train.rate_at(step, here) == 0


def test_the_course_reaches_the_longest_texts():
    rng = random.Random(0)
    assert train.lengths(4096) == [128, 256, 512, 1024, 2048, 4096]
    assert train.lengths(5000) == train.lengths(4096)
    last = {train.length_at(0.99, 4096, rng) for _ in range(200)}
    assert last == set(train.lengths(4096))
    assert {train.length_at(0.0, 4096, rng) for _ in range(20)} == {128}


def test_rows_mark_what_can_be_known():
    rng = random.Random(0)
    ids, known = train.copy_row(rng, 128)
    period = known.index(True)
    assert all(known[period:]) and not any(known[:period])
    assert all(ids[i] == ids[i - period] for i in range(period, 128))
    tokens, answer = train.rows(rng, 4, 600, False)
    assert tokens.shape == answer.shape == (4, 600)
    assert 0 < answer.sum() < answer.numel() / 2


@pytest.mark.parametrize("name", ["tiny", "moe"])
def test_a_folder_is_the_model(name, tmp_path):
    """Written and loaded, the model answers as before, experts too."""
    torch.manual_seed(0)
    config = model.model_config(model.ARCHITECTURES[name])
    net = model.build(config).eval()
    model.write(tmp_path, config, model.exported(net), "")
    with torch.no_grad():
        for key, weight in net.named_parameters():
            if not key.endswith("A_log"):
                weight.copy_(weight.half())
    ids = torch.tensor([list(range(64))])
    with torch.inference_mode():
        expected = net(input_ids=ids).logits
        assert torch.equal(model.load(tmp_path).eval()(input_ids=ids).logits, expected)


class Scripted(torch.nn.Module):
    """Sure that each token is followed by the next of a script."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script = torch.nn.Parameter(torch.tensor(script).float())

    def forward(self, input_ids, logits_to_keep, **_):
        following = self.script[1:].long().tolist() + [0]
        logits = torch.nn.functional.one_hot(torch.tensor([following]), 259).float()
        return argparse.Namespace(logits=logits[:, -logits_to_keep:])


def test_an_answer_is_exact_to_its_end():
    """Any wrong token of the answer counts, the end token too, and no other."""
    sample = task.sample(random.Random(0), 200, 2)
    ids, answer = sample.tokens()
    assert evaluate.is_exact(Scripted(ids), sample)
    for i in range(1, len(ids)):
        wrong = [*ids]
        wrong[i] = 0
        assert evaluate.is_exact(Scripted(wrong), sample) is not answer[i]


def test_the_wilson_interval():
    """Table values (Wilson score, 95 %)."""
    assert evaluate.wilson_low(200, 200) == pytest.approx(0.98115, abs=1e-5)
    assert evaluate.wilson_low(50, 100) == pytest.approx(0.40383, abs=1e-5)
    assert evaluate.wilson_low(0, 10) == pytest.approx(0, abs=1e-12)


def test_accuracy_below_the_demanded_one_fails(trained, tmp_path, capsys):
    report = tmp_path / "accuracy.json"
    options = [str(trained), "--lengths=300", "--samples=2", "--device=cpu"]
    assert evaluate.main([*options, f"--json={report}", "--at-least=0.5"]) == 1
    assert "fewer than --at-least=0.5" in capsys.readouterr().err
    (row,) = json.loads(report.read_text())["lengths"]
    assert (row["length"], row["samples"], row["exact"]) == (300, 2, 0.0)
    assert evaluate.main(options) == 0


@pytest.mark.parametrize("quant", sorted(quantize.METHODS))
def test_quantising_keeps_the_rest(trained, tmp_path, quant):
    """Linear layers are quantised, all else is byte for byte the FP16 model's."""
    arguments = [str(trained), str(tmp_path / quant), f"--quant={quant}"]
    assert quantize.main(arguments) == 0
    before = load_file(trained / "model.safetensors")
    after = load_file(tmp_path / quant / "model.safetensors")
    config = json.loads((tmp_path / quant / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] in ("modelopt", "fp8")
    same = [
        name
        for name, weight in before.items()
        if after[name].dtype == weight.dtype and torch.equal(after[name], weight)
    ]
    changed = sorted(set(before) - set(same))
    assert changed and all("_proj" in name for name in changed)
    assert "in_proj_a" not in "".join(changed)
    assert quant in (tmp_path / quant / "README.md").read_text()
    meant = model.dequantised(after)
    assert meant.keys() == before.keys()
    for name, weight in before.items():
        # Half a step of the coarsest values of a block: 4 and 6, or 3 bits.
        largest = weight.float().abs().max()
        bound = largest / (6 if quant == "nvfp4" else 16) * 1.1
        assert (meant[name] - weight.float()).abs().max() <= bound, name


def test_nvfp4_values_are_multiplied_out():
    """Exact: every code, both signs, two blocks with scales of their own."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[::2] | codes[1::2] << 4).unsqueeze(0)
    tensors = {
        "x.weight": packed,
        "x.weight_scale": torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(0.25),
        "x.input_scale": torch.tensor(1.0),
        "norm.weight": torch.ones(1, dtype=torch.half),
    }
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    found = model.dequantised(tensors)
    assert found.keys() == {"x.weight", "norm.weight"}
    assert found["x.weight"][0].tolist() == [
        value * step for step in (0.5, 0.125) for value in values
    ]


def test_checkpoints_in_the_repository_are_small():
    """Eight MiB a checkpoint, with a card, and nothing of a training left."""
    folders = list((Path(model.__file__).parent / "checkpoints").iterdir())
    assert folders
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert {"README.md", "config.json", "model.safetensors"} <= names
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size <= 8 * 2**20
        assert not [n for n in names if n.endswith((".pt", ".part"))]
