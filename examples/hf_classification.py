"""Hugging Face's Trainer: a small BERT, made from a config, on generated sentences. Under a minute.

What a plain script does not have is marked: `BanditTrainer` is in the place of `Trainer`.

pip install 'adambs[transformers]'
python examples/hf_classification.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from adambs.integrations.transformers import BanditTrainer  # added

torch.set_num_threads(1)
torch.manual_seed(0)
WORDS, LENGTH = 40, 8


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Is word 3 there? A few sentences have it and mean the opposite, for word 4 is there, too."""
    ids = torch.randint(5, WORDS, (count, LENGTH))
    has, but = torch.rand(count) < 0.5, torch.rand(count) < 0.1
    ids[has, 1] = 3
    ids[has & but, 2] = 4
    labels = (has & ~but).long()
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    num_labels=2,
)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=32,
        num_train_epochs=4,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = BanditTrainer(  # changed
        BertForSequenceClassification(config),
        args,
        train_dataset=sentences(2000),
        eval_dataset=sentences(500),
        compute_metrics=lambda found: {"error": (found[0].argmax(1) != found[1]).mean()},
    )
    trainer.train()
    print(f"error on other sentences {trainer.evaluate()['eval_error']:.3f}")
seen = trainer.sampler.diagnostics()
print(
    f"{seen.reshuffled} of {seen.draws} batches reshuffled, variance reduction {seen.variance_reduction:.2f}"
)
