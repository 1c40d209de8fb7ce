"""Hugging Face's Trainer against the plain loop, for classification and for a causal language model."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import CAP, capped_alike, learned, optional, same

import adambs

transformers = optional("transformers")
optional("accelerate")
from adambs.integrations import transformers as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

N, K = 60, 10


def bert(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1, **rates
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(causal):
    """Texts of 2 to 9 words, most of one word; the classes are the last words' thirds."""
    rng = torch.Generator().manual_seed(5)
    found = []
    for _ in range(N):
        length = int(torch.randint(2, 10, (1,), generator=rng))
        ids = torch.randint(2, 30, (length,), generator=rng)
        if torch.rand((), generator=rng) < 0.7:
            ids[:] = 7
        found.append({"input_ids": ids, "labels": ids if causal else int(ids[-1]) % 3})
    return found


def collate(examples):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [e["input_ids"] for e in examples]
    labels = [e["labels"] for e in examples]
    several = isinstance(labels[0], torch.Tensor)
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100) if several else torch.tensor(labels),
    }


def arguments(folder, **options):
    given = {
        "per_device_train_batch_size": K, "num_train_epochs": 3, "learning_rate": 0.02, "seed": 0,
        "lr_scheduler_type": "linear", "optim": "adamw_torch", "report_to": [], "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "logging_strategy": "no",
        **options,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **given)


def a_sampler(cap=math.inf):
    return adambs.BanditSampler(N, K, seed=0, rule=adambs.Tracking(uniform=0.1), cap=cap)


def a_trainer(folder, model, causal, sampler="new", **options):
    sampler = a_sampler() if sampler == "new" else sampler
    own = {name: options.pop(name) for name in ("log_every", "tokens_per_example") if name in options}
    return ours.BanditTrainer(
        model, arguments(folder, **options), train_dataset=sentences(causal), data_collator=collate,
        sampler=sampler, **own,
    )  # fmt: skip


def plain_loop(model, causal, accumulate, epochs=3, cap=math.inf):
    """The same without a trainer: groups of batches are drawn before they are trained on, as it does."""
    sampler = a_sampler(cap)
    loader = adambs.BanditLoader(sentences(causal), sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    updates = -(-len(loader) // accumulate) * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, updates - step) / updates)
    constant = sum(len(e["labels"]) for e in sentences(True)) / N if causal else None
    model.train()
    for _ in range(epochs):
        batches = iter(loader)
        while group := [batch for _, batch in zip(range(accumulate), batches, strict=False)]:
            for batch, draw in group:
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                if causal:
                    losses, found = adambs.scores.causal_lm(logits, batch["labels"], constant=constant)
                else:
                    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
                    found = adambs.scores.cross_entropy(logits, batch["labels"])
                draw.mean(losses, found)  # so that the sampler knows of the cap, which is by hand here
                weights = (
                    (torch.full_like(found, draw.limit) / found).clamp(min=1).minimum(draw.weights.float())
                )
                ((losses * weights).mean() / len(group)).backward()  # in this order: biases of keys are noise
                sampler.update(draw, found)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model, sampler


@pytest.mark.parametrize(
    ("causal", "accumulate", "cap"), [(False, 1, math.inf), (True, 4, math.inf), (True, 4, CAP)]
)
def test_the_parameters_are_those_of_the_plain_loop(tmp_path, causal, accumulate, cap):
    make = gpt2 if causal else bert
    options = {"sampler": a_sampler(cap), "gradient_accumulation_steps": accumulate}
    trainer = a_trainer(tmp_path, make(), causal, **options)
    trainer.train()
    model, sampler = plain_loop(make(), causal, accumulate, cap=cap)
    assert cap == math.inf or capped_alike(trainer.sampler, sampler)
    for (name, found), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert same(trainer.sampler.state_dict()["awaited"], sampler.state_dict()["awaited"])
    torch.testing.assert_close(trainer.sampler.probabilities(), sampler.probabilities(), rtol=1e-4, atol=0)
    assert learned(trainer.sampler)


@pytest.mark.parametrize(("causal", "at"), [(True, 3), (False, 4)], ids=["mid-epoch", "between epochs"])
def test_a_run_goes_on_bit_for_bit(tmp_path, causal, at):
    """Six batches an epoch in groups of four: updates 3 and 4 are the second epoch's. With dropout."""
    make = gpt2 if causal else bert
    options = {"gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = a_trainer(tmp_path, make(0.1), causal, **options)
    whole.train()
    again = a_trainer(tmp_path / "again", make(0.1), causal, **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert whole.state.global_step == again.state.global_step == 6
    assert whole.state.epoch == again.state.epoch == 3.0
    assert same(whole.model.state_dict(), again.model.state_dict())
    assert same(whole.sampler.state_dict()["rule"], again.sampler.state_dict()["rule"])
    assert same(whole.sampler.state_dict()["random"], again.sampler.state_dict()["random"])
    assert learned(again.sampler)


def test_the_sampler_is_made_if_there_is_none_and_diagnostics_are_logged(tmp_path):
    trainer = a_trainer(tmp_path, bert(), False, sampler=None, log_every=6, num_train_epochs=1)
    trainer.train()
    assert (trainer.sampler.n, trainer.sampler.batch_size, trainer.sampler.seed) == (N, K, 0)
    [logged] = [entry for entry in trainer.state.log_history if "bandit/draws" in entry]
    assert logged["bandit/draws"] == 6


def test_evaluation_is_the_trainers_own(tmp_path):
    model = bert(0.1)
    found = a_trainer(tmp_path, model, False).evaluate(sentences(False))
    plain = transformers.Trainer(model, arguments(tmp_path), data_collator=collate)
    assert found["eval_loss"] == plain.evaluate(sentences(False))["eval_loss"]


def test_a_loss_of_ones_own_that_forgets_the_feedback_is_told(tmp_path):
    class Forgetful(ours.BanditTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**ours.without_draw(inputs)).loss

    for kind, told in ((Forgetful, 1), (ours.BanditTrainer, 0)):
        trainer = kind(
            bert(), arguments(tmp_path), train_dataset=sentences(False), data_collator=collate,
            sampler=a_sampler(), eval_dataset=sentences(False),
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert sum("6 batches is over and no scores came back" in str(w.message) for w in caught) == told
        assert not any("nobody asked for their weights" in str(w.message) for w in caught)


def test_losses_of_other_heads():
    """Against transformers' own losses, each example alone."""

    class Outside:
        args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
        _constant = None

    torch.manual_seed(0)
    several, wanted = torch.randn(4, 3), torch.rand(4, 3).round()
    losses, found = ours.BanditMixin.losses_and_scores(Outside(), None, {"logits": several}, wanted)
    z = several.requires_grad_()
    for k in range(4):
        expected = F.binary_cross_entropy_with_logits(z[k], wanted[k])
        assert losses[k].item() == pytest.approx(expected.item(), rel=1e-5)
        (gradient,) = torch.autograd.grad(expected, z)
        assert found[k].item() == pytest.approx(gradient.norm().item(), rel=1e-5)
    one, values = torch.randn(4, 1), torch.randn(4)
    losses, found = ours.BanditMixin.losses_and_scores(Outside(), None, (one,), values)
    torch.testing.assert_close(losses, (one[:, 0] - values) ** 2)
    torch.testing.assert_close(found, 2 * (one[:, 0] - values).abs())
    with pytest.raises(ValueError, match="no loss is known for logits of shape"):
        ours.BanditMixin.losses_and_scores(Outside(), None, (torch.randn(4),), values)


def test_which_label_a_position_predicts():
    class Own(transformers.GPT2LMHeadModel):
        pass

    tags = transformers.BertForTokenClassification(bert().config)
    assert ours._is_causal(gpt2())
    assert ours._is_causal(Own(gpt2().config))
    assert not ours._is_causal(tags)
    with pytest.raises(ValueError, match="whether position t of Linear predicts label t or t"):
        ours._is_causal(torch.nn.Linear(2, 2))


def test_lora_is_causal_as_what_it_adapts_is():
    peft = optional("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    assert ours._is_causal(peft.get_peft_model(gpt2(), config))


def test_what_is_wrong_is_told(tmp_path):
    with pytest.raises(ValueError, match="dataloader_drop_last is True"):
        a_trainer(tmp_path, bert(), False, dataloader_drop_last=True)
    with pytest.raises(ValueError, match=r"sampler.batch_size is 5, and the trainer's is 10"):
        a_trainer(tmp_path, bert(), False, sampler=adambs.BanditSampler(N, 5)).train()
    with pytest.raises(ValueError, match="dataset has 60 examples but"):
        a_trainer(tmp_path, bert(), False, sampler=adambs.BanditSampler(N + 1, K)).train()

    class Reduced(ours.BanditTrainer):
        def losses_and_scores(self, model, outputs, labels):
            losses, found = super().losses_and_scores(model, outputs, labels)
            return losses.mean(), found

    trainer = a_trainer(tmp_path, bert(), False)
    trainer.__class__ = Reduced
    with pytest.raises(ValueError, match="it looks reduced already"):
        trainer.train()

    trainer = a_trainer(tmp_path, bert(), False)
    wrapped = adambs.BanditLoader(sentences(False), a_sampler(), carry=True, collate_fn=collate)
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
            evaluate(wrapped)
    trainer.eval_dataset = {"plain": sentences(False), "drawn": wrapped}
    with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
        trainer.evaluate()
    batch = collate(sentences(False)[:K])
    trainer.model.train()
    with pytest.raises(ValueError, match="carries no draw"):
        trainer.compute_loss(trainer.model, batch)

    plain = transformers.Trainer(
        bert(), arguments(tmp_path / "plain", save_strategy="steps", save_steps=6, num_train_epochs=1),
        train_dataset=sentences(False), data_collator=collate,
    )  # fmt: skip
    plain.train()
    with pytest.raises(ValueError, match=r"has no bandit.pt: it was saved without a bandit"):
        a_trainer(tmp_path, bert(), False).train(str(tmp_path / "plain" / "checkpoint-6"))


class Reduces(torch.nn.Module):
    """A model that keeps its logits to itself."""

    def __init__(self):
        super().__init__()
        self.inner = bert()

    def forward(self, input_ids, attention_mask, labels=None):
        return {"loss": self.inner(input_ids, attention_mask=attention_mask, labels=labels).loss}


class Demands(Reduces):
    """One that cannot do without labels."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, attention_mask, labels)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(sentences(False))


def test_models_and_data_that_cannot_be_weighted_are_refused(tmp_path):
    def begin(model=None, train=None, **options):
        own = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
        args = arguments(tmp_path, **options)
        train = sentences(False) if train is None else train
        return ours.BanditTrainer(model or bert(), args, train_dataset=train, data_collator=collate, **own)

    with pytest.raises(ValueError, match="the model returns loss and no logits"):
        begin(Reduces()).train()
    with pytest.raises(ValueError, match=r"Demands.forward cannot do without labels"):
        begin(Demands())
    with pytest.raises(ValueError, match="compute_loss_func reduces the losses"):
        begin(compute_loss_func=lambda *_, **__: torch.zeros(()))
    with pytest.raises(ValueError, match="train_sampling_strategy is 'group_by_length'"):
        begin(train_sampling_strategy="group_by_length")
    with pytest.raises(TypeError, match=r"train_dataset .Endless. must have len.* BanditStream"):
        begin(train=Endless(), max_steps=3)
    with pytest.raises(TypeError, match="train_dataset is a bandit's loader"):
        begin(train=adambs.BanditLoader(sentences(False), a_sampler(), collate_fn=collate))


def test_sft_trainer(tmp_path):
    """TRL's trainer with the mixin: trains as ours does on the same tokens, and p learns."""
    trl, datasets = optional("trl"), optional("datasets")
    tokenizers = optional("tokenizers")
    words = {f"w{i}": i for i in range(28)} | {"[PAD]": 28, "[END]": 29}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[END]"
    )
    texts = [" ".join(f"w{i % 28}" for i in e["input_ids"].tolist()) for e in sentences(True)]

    class Both(ours.BanditMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(
        str(tmp_path), per_device_train_batch_size=K, num_train_epochs=2, learning_rate=0.02, report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", max_length=16,
        dataloader_pin_memory=False, logging_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    model = gpt2()
    before = model.transformer.wte.weight.detach().clone()
    trainer = Both(
        model, args, train_dataset=datasets.Dataset.from_dict({"text": texts}), processing_class=tokenizer,
        sampler=a_sampler(),
    )  # fmt: skip
    trainer.train()
    assert trainer.sampler.diagnostics().updates == 12
    assert learned(trainer.sampler)
    assert not torch.equal(before, model.transformer.wte.weight)
    ours_alone = ours.BanditTrainer(
        gpt2(), args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator,
        sampler=a_sampler(),
    )  # fmt: skip
    ours_alone.train()
    assert same(ours_alone.model.state_dict(), model.state_dict())
    assert same(ours_alone.sampler.state_dict()["rule"], trainer.sampler.state_dict()["rule"])
