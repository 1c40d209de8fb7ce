"""accelerate on scikit-learn's handwritten digits, alone or on several processes.

pip install 'adambs[accelerate]' scikit-learn
python examples/with_accelerate.py
accelerate launch --cpu --num_processes 2 examples/with_accelerate.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import adambs
from adambs.integrations.accelerate import prepare

torch.set_num_threads(1)
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
train = TensorDataset(x[:1500], y[:1500])

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=3e-3))
sampler = adambs.BanditSampler(len(train), batch_size=32, seed=0)  # of all processes together
loader = prepare(accelerator, train, sampler)  # saved with accelerator.save_state

for _ in range(10):
    for inputs, labels, drawn in loader:
        with accelerator.accumulate(model):
            logits = model(inputs)
            scores = adambs.scores.cross_entropy(logits, labels)
            accelerator.backward(drawn.mean(F.cross_entropy(logits, labels, reduction="none"), scores))
            sampler.update(drawn.number, scores)
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    error = (net(x[1500:]).argmax(1) != y[1500:]).float().mean()
seen = sampler.diagnostics()
accelerator.print(f"test error {error:.3f}, variance reduction {seen.variance_reduction:.2f}")
