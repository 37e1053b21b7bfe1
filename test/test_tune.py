"""What was trained on the built-in model does what it was trained for, and the trainer computes what is served."""

import pytest
import torch
from models import ROOT

from demo import tune_lora, tune_state, tuning
from rwkv_batch.model import reference_ops, weights
from rwkv_batch.model.adapters import adapter_file
from rwkv_batch.model.packed_rows import PackedRows
from rwkv_batch.model.rwkv7 import Model
from rwkv_batch.model.state import State
from rwkv_batch.tuned.state_file import read_state


@pytest.fixture(scope="module")
def model() -> tuning.DemoModel:
    return tuning.DemoModel()


def test_the_trainer_computes_what_is_served(model):
    """Two texts of different lengths, from a state that is not empty."""
    loaded = weights.load(ROOT / "demo" / "model.rwkv")
    initial = torch.randn(8, 4, 64, 64, generator=torch.Generator().manual_seed(0)) * 0.3
    ids = torch.randint(1, 8000, (2, tuning.LONGEST), generator=torch.Generator().manual_seed(1))
    state = State(loaded.shape, 2)
    for slot in (0, 1):
        state.wkv[:, slot] = initial
    rows = PackedRows([0, 1], [tuning.LONGEST] * 2)
    last = torch.arange(2 * tuning.LONGEST)
    wanted = Model(loaded, reference_ops).forward(ids.flatten(), rows, state, logits_of=last)
    found = model.hidden(ids, None, initial).flatten(0, 1) @ model.head.t()
    assert loaded.output_ids.tolist() == model.kept.tolist()
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_the_lora_does_what_it_was_trained_for(model):
    """9 of 10 held-out answers carry the mark, and the loss of such answers is a fraction; without it none does."""
    held = tuning.held_out()
    texts = tuning.Texts(tune_lora.marked, held)
    assert not any(tune_lora.MARK.strip() in answer for answer in texts.plain)
    answers = tuning.answers(tuning.served(adapter=f"{tune_lora.FILE}:1"), held, tokens=8)
    assert len(held) >= 10
    assert sum(answer.startswith(tune_lora.MARK) for answer in answers) >= 0.9 * len(held)
    changes = adapter_file.read(tune_lora.FILE, adapter_file.Scaling(1.0)).changes

    def change(name, x):
        found = changes.get(f"{name}.weight")
        return 0 if found is None else x @ found.a.t() @ found.b.t()

    with torch.no_grad():
        plain, changed = model.loss(texts.rows), model.loss(texts.rows, change)
    assert changed < 0.2 * plain


def test_the_state_does_what_it_was_trained_for(model):
    """The same of the state that was trained; one engine answers with it and without."""
    held = tuning.held_out()
    loop = tuning.served(state=f"meow={tune_state.FILE}")
    texts = tuning.Texts(tune_state.marked, held, loop)
    assert not any(tune_state.MARK.strip() in answer for answer in texts.plain)
    answers = tuning.answers(loop, held, tokens=8, state=loop.tuned.variants[0].key)
    assert sum(answer.startswith(tune_state.MARK) for answer in answers) >= 0.9 * len(held)
    initial = read_state(tune_state.FILE, loop.engine.state.shape, field="state").wkv
    with torch.no_grad():
        plain, changed = model.loss(texts.rows), model.loss(texts.rows, initial=initial)
    assert changed < 0.2 * plain


@pytest.mark.long
def test_a_few_steps_of_training_lower_the_loss(model):
    rows, lora = [(list(range(300, 310)), 4), (list(range(400, 408)), 3)], tune_lora.Lora(model)
    with torch.no_grad():
        before = model.loss(rows, lora)
    tuning.train(lora.parts.values(), lambda batch: model.loss(batch, lora), rows, steps=3, rate=1e-2, batch=2)
    with torch.no_grad():
        assert model.loss(rows, lora) < before
