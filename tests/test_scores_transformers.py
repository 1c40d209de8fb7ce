"""Exact norms of stock BERT and GPT-2, and of LoRA, against a loop over single examples."""

import pytest
import torch
import torch.nn.functional as F
from helpers import a_draw
from torch import nn

import adambs
from adambs.scores import layers, registry

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def bert():
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).double()


def losses_of(model, inputs):
    labels = inputs["labels"]
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels[:, 0] % 3, reduction="none")
    return adambs.scores.causal_lm(logits, labels, constant=5.0).losses


def some_inputs(K=4, T=6):
    """Rows of several lengths, padded at the end."""
    torch.manual_seed(1)
    ids = torch.randint(2, 40, (K, T))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[2, 2:] = 0
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def one_by_one(model, inputs):
    """The oracle: each example alone through autograd."""
    found = []
    trainable = [p for p in model.parameters() if p.requires_grad]
    for k in range(len(inputs["input_ids"])):
        one = {name: value[k : k + 1] for name, value in inputs.items()}
        grads = torch.autograd.grad(losses_of(model, one).sum(), trainable, allow_unused=True)
        found.append(torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt())
    return torch.stack(found)


def assert_exact(model, inputs):
    expected = one_by_one(model, inputs)
    draw = a_draw(len(expected))
    with adambs.scores.ExactNorms(model) as norms:
        draw.mean(losses_of(model, inputs)).backward()
        torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=1e-12)
    assert expected.std() > 1e-3 * expected.mean()  # not all alike


@pytest.mark.parametrize("make", [bert, gpt2])
def test_stock_models_as_they_come(make):
    """Broadcast position embeddings, padding, and GPT-2's head tied to its embedding."""
    torch.manual_seed(0)
    model = make().eval()
    assert_exact(model, some_inputs())


def test_dropout_is_that_of_the_pass():
    """In training mode: nothing is run again, so nothing is refused."""
    torch.manual_seed(0)
    model = gpt2().train()
    draw, inputs = a_draw(4), some_inputs()
    with adambs.scores.ExactNorms(model) as norms:
        draw.mean(losses_of(model, inputs)).backward()
        assert norms(draw).isfinite().all()


def test_conv1d_has_a_formula():
    layer = transformers.pytorch_utils.Conv1D(3, 5)
    assert registry._formula(layer) is layers.transposed_linear


def test_a_position_table_without_a_batch_says_what_to_pass():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(10, 4), nn.Embedding(10, 4)

        def forward(self, x):
            return self.words(x) + self.places(torch.arange(x.shape[1]))

    model, draw = Model(), a_draw(4)
    norms = adambs.scores.ExactNorms(model)
    draw.mean(model(torch.randint(10, (4, 6))).square().sum((1, 2))).backward()
    with pytest.raises(ValueError, match=r"places .Embedding. saw a first dimension of 6.*shape .K, T."):
        norms(draw)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_lora_is_scored_by_its_trainable_part(make):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    targets = ["query", "value"] if make is bert else ["c_attn"]
    config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=make is gpt2)
    model = peft.get_peft_model(make(), config).double().eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, where half of the gradients vanish
            nn.init.normal_(parameter)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora" in name for name in names)
    assert_exact(model, some_inputs())
