"""Cross-validation: each rank trains models of its own, for other parts of the data. Only the results are exchanged.

hvdliterun -np 2 python examples/cookbook/kfold.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

hvd.init()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def score(train: torch.Tensor, test: torch.Tensor, width: int) -> float:
    """Train a model in this process, and return its share of right answers. No rank waits for another here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # a plain one
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


folds = [tuple(map(torch.tensor, fold)) for fold in KFold(5, shuffle=True, random_state=0).split(images)]
work = [(width, number) for width in (8, 64) for number in range(len(folds))]
mine = {(width, number): score(*folds[number], width) for width, number in work[hvd.rank() :: hvd.size()]}

scores = {key: value for part in hvd.allgather_object(mine) for key, value in part.items()}
if hvd.rank() == 0:
    for width in (8, 64):
        found = torch.tensor([scores[width, number] for number in range(len(folds))])
        print(f"width {width}: {100 * found.mean():.1f} ± {100 * found.std():.1f} % are right")
