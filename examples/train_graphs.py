"""Graphs of uneven nodes and edges: a batch holds at most so many of either, with torch_geometric's own ``Batch``.

usage: python examples/train_graphs.py        needs torch_geometric
"""

from __future__ import annotations

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv, global_mean_pool

from dynagroup import AdditiveCap, PlannedDataLoader

NUM_GRAPHS = 240
MOST_NODES = 300
MOST_EDGES = 1500


def graph(number: int) -> Data:
    """A ring, with chords in every third graph; labelled by whether it has chords."""
    num_nodes = 3 + 11 * number % 40
    has_chords = number % 3 == 0
    ring = torch.arange(num_nodes)
    edges = []
    for hop in range(1, 8 if has_chords else 2):
        edges.append(torch.stack([ring, (ring + hop) % num_nodes]))
    one_way = torch.cat(edges, dim=1)
    both_ways = torch.cat([one_way, one_way.flip(0)], dim=1)
    features = torch.stack([torch.sin(ring + number), torch.full((num_nodes,), 0.1)], dim=1)
    return Data(x=features, edge_index=both_ways, y=torch.tensor([int(has_chords)]))


class GraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GraphConv(2, 16)
        self.second = GraphConv(16, 16)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index).relu()
        hidden = self.second(hidden, batch.edge_index).relu()
        logits = self.head(global_mean_pool(hidden, batch.batch))
        return torch.nn.functional.cross_entropy(logits, batch.y)


def main(epochs: int = 3) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses by update, and (nodes, edges) by batch."""
    graphs = [graph(number) for number in range(NUM_GRAPHS)]
    lengths = {
        "nodes": [graph.num_nodes for graph in graphs],
        "edges": [graph.num_edges for graph in graphs],
    }
    loader = PlannedDataLoader(
        graphs,
        lengths,
        AdditiveCap("nodes", MOST_NODES) & AdditiveCap("edges", MOST_EDGES),
        samples_per_update=48,
        collate_fn=Batch.from_data_list,
        weigh="samples",  # the loss is a mean over graphs
    )
    torch.manual_seed(0)
    model = GraphNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    shapes = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = 0.0
            for step in update:
                loss = model(step.batch) * step.loss_scale
                loss.backward()
                total += loss.item()
                shapes.append((step.batch.num_nodes, step.batch.num_edges))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses, shapes


if __name__ == "__main__":
    main()
