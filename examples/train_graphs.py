"""Graphs of uneven nodes and edges: a batch holds at most so many of either, with torch_geometric's own ``Batch``.

usage: python examples/train_graphs.py        needs torch_geometric
"""

from __future__ import annotations

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv, global_mean_pool

from dynagroup import AdditiveCap, PlannedDataLoader

MOST_NODES, MOST_EDGES = 300, 1500


def graph(number: int) -> Data:
    """A ring, with chords in every third graph; labelled by whether it has chords."""
    nodes, chords = 3 + 11 * number % 40, number % 3 == 0
    ring = torch.arange(nodes)
    edges = torch.stack([ring, (ring + 1) % nodes])
    if chords:
        edges = torch.cat(
            [edges, *(torch.stack([ring, (ring + hop) % nodes]) for hop in range(2, 8))], dim=1
        )
    features = torch.stack([torch.sin(ring + number), torch.full((nodes,), 0.1)], dim=1)
    return Data(
        x=features,
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
        y=torch.tensor([int(chords)]),
    )


class GraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            GraphConv(2, 16),
            GraphConv(16, 16),
            torch.nn.Linear(16, 2),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index).relu()
        hidden = self.second(hidden, batch.edge_index).relu()
        return torch.nn.functional.cross_entropy(
            self.head(global_mean_pool(hidden, batch.batch)), batch.y
        )


def main(epochs: int = 3) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses by update, and (nodes, edges) by batch."""
    graphs = [graph(number) for number in range(240)]
    loader = PlannedDataLoader(
        graphs,
        {"nodes": [g.num_nodes for g in graphs], "edges": [g.num_edges for g in graphs]},
        AdditiveCap("nodes", MOST_NODES) & AdditiveCap("edges", MOST_EDGES),
        samples_per_update=48,
        collate_fn=Batch.from_data_list,
        weigh="samples",  # the loss is a mean over graphs
    )
    torch.manual_seed(0)
    net, losses, shapes = GraphNet(), [], []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = 0.0
            for step in update:
                loss = net(step.batch) * step.loss_scale
                loss.backward()
                total += float(loss.detach())
                shapes.append((step.batch.num_nodes, step.batch.num_edges))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses, shapes


if __name__ == "__main__":
    main()
