"""Hugging Face's Trainer: a small GPT-2, made from a config, on generated sequences. Under a minute.

What a plain script does not have is marked: `BanditTrainer` is in the place of `Trainer`.

pip install 'adambs[transformers]'
python examples/hf_causal_lm.py
"""

import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from adambs.integrations.transformers import BanditTrainer  # added

torch.set_num_threads(1)
torch.manual_seed(0)
WORDS, LENGTH = 32, 16


def sequences(count: int) -> list[torch.Tensor]:
    """Most count upwards; one in ten counts in steps of seven; lengths differ."""
    found = []
    for _ in range(count):
        length, start = int(torch.randint(6, LENGTH, ())), int(torch.randint(WORDS, ()))
        step = 7 if torch.rand(()) < 0.1 else 1
        found.append((start + step * torch.arange(length)) % WORDS)
    return found


def collate(examples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad; padding has no loss."""
    return {
        "input_ids": pad_sequence(examples, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(e) for e in examples], batch_first=True),
        "labels": pad_sequence(examples, batch_first=True, padding_value=-100),
    }


config = GPT2Config(
    vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model, train = GPT2LMHeadModel(config), sequences(1200)
    trainer = BanditTrainer(model, args, train_dataset=train, data_collator=collate)  # changed
    trainer.train()
    print(f"loss a token on other sequences {trainer.evaluate(sequences(300))['eval_loss']:.3f}")
steps = torch.tensor([(e[1] - e[0]) % WORDS == 7 for e in train])
p = trainer.sampler.probabilities()
print(f"a sequence in steps of seven is {p[steps].mean() / p[~steps].mean():.1f} times as likely as another")
