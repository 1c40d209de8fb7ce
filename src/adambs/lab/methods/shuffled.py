"""Adam and the plain SGD family on batches that are reshuffled each epoch, as everyone uses them."""

import torch

from adambs.lab.methods.base import Method, Plain

KERAS = "the learning rate is Keras' default, since the paper names none"


class Shuffled(Method):
    """Reshuffled each epoch, every example once: what a DataLoader with ``shuffle=True`` does.

    Only that a batch at the end of a pass is filled up from the next, so that all have K examples.
    """

    def choose(self) -> Plain:
        """The next K of the pass."""
        return Plain(torch.from_numpy(self.passes.take(self.task.batch_size)))


class Adam(Shuffled):
    name = "adam"
    title = "Adam"
    summary = "Adam on batches reshuffled each epoch: the baseline"
    citation = "Kingma and Ba, ICLR 2015"


class AMSGrad(Shuffled):
    name = "amsgrad"
    title = "AMSGrad"
    summary = "Adam with the largest second moment so far"
    citation = "Reddi, Kale and Kumar, ICLR 2018"
    options = {"amsgrad": True}


class AdamW(Shuffled):
    name = "adamw"
    title = "AdamW"
    summary = "Adam with decoupled weight decay, 0.01 as in torch: what transformers are trained with"
    citation = "Loshchilov and Hutter, ICLR 2019"
    optimizer_class = torch.optim.AdamW


class NAdam(Shuffled):
    name = "nadam"
    title = "Nadam"
    summary = "Adam with Nesterov momentum"
    citation = "Dozat, ICLR workshop 2016"
    optimizer_class = torch.optim.NAdam


class RMSprop(Shuffled):
    name = "rmsprop"
    title = "RMSprop"
    summary = "gradients divided by a running root mean square"
    citation = "Tieleman and Hinton, 2012"
    optimizer_class = torch.optim.RMSprop
    options = {"alpha": 0.9}


class SGD(Shuffled):
    name = "sgd"
    title = "SGD"
    summary = f"plain stochastic gradient descent, lr 0.01; {KERAS}"
    citation = "Robbins and Monro, 1951"
    optimizer_class = torch.optim.SGD
    options = {"lr": 0.01}


class Momentum(Shuffled):
    name = "momentum"
    title = "Momentum"
    summary = f"SGD with momentum 0.9, lr 0.01; {KERAS}"
    citation = "Polyak, 1964"
    optimizer_class = torch.optim.SGD
    options = {"lr": 0.01, "momentum": 0.9}


class Adagrad(Shuffled):
    name = "adagrad"
    title = "Adagrad"
    summary = f"gradients divided by the root of the sum of their squares, lr 0.01; {KERAS}"
    citation = "Duchi, Hazan and Singer, JMLR 2011"
    optimizer_class = torch.optim.Adagrad
    options = {"lr": 0.01}


class Adadelta(Shuffled):
    name = "adadelta"
    title = "Adadelta"
    summary = f"Adagrad with a window and no units, lr 1; {KERAS}"
    citation = "Zeiler, 2012"
    optimizer_class = torch.optim.Adadelta
    options = {"lr": 1.0, "rho": 0.95}
